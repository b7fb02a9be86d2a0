"""A run that is short of memory sees the same rows and gives the same losses; what it measures of its memory decides
what it holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.blockwise import Blockwise
from memory.budget import Budget
from memory.controller import MemoryController
from memory.estimate.workload import Machine
from memory.monitor import Monitor
from memory.plan import Plan, plan
from memory.processes import ProcessTree, Usage
from memory.step_settings import StepSettings
from settings.declared import Config
from settings.errors import DoesNotFit
from settings.loading import load
from support.units import GIB, MIB
from tests.end_to_end.running import write_text
from tests.fake_device import OUT_OF_MEMORY, FakeDevice
from tests.training.small_runs import configuration, events
from trainer_low_mem import LowMemTrainer

# A run of `small_runs` takes so many steps of so many rows.
STEPS = 6
ROWS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("controller")
    write_text(folder / "text.txt")
    return folder


def run(folder: Path, name: str, **flags: object) -> list[float]:
    LowMemTrainer(configuration(folder, name, **flags)).train()
    steps = events(folder, name, "step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    return [event["loss"] for event in steps]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[float]:
    return run(folder, "undisturbed")


def fail_above(
    patched: pytest.MonkeyPatch, most_rows: int, step: int, flavour: str = "cpu", after_updates: int = 0
) -> list[int]:
    """Let passes run out of memory while a micro-batch has more rows, from one step on. Returns the rows of those that
    do.

    Args:
        flavour: of the error. after_updates: weights that are updated before it.
    """
    gradients = Blockwise.gradients
    passes = count(1)
    failed = list[int]()

    def run_out(blockwise, micro_batches, total_labels, update, *rest, **named):
        rows = max(len(micro_batch.source.lengths) for micro_batch in micro_batches)
        updates = count()
        plain = update.apply

        def apply(weights):
            if next(updates) == after_updates:
                failed.append(rows)
                raise OUT_OF_MEMORY[flavour](2**30)
            plain(weights)

        if next(passes) >= step and rows > most_rows:
            update.apply = apply
        try:
            return gradients(blockwise, micro_batches, total_labels, update, *rest, **named)
        finally:
            update.apply = plain

    patched.setattr(Blockwise, "gradients", run_out)
    return failed


def test_the_same_step_runs_again_in_a_smaller_way(folder, undisturbed, monkeypatch):
    failed = fail_above(monkeypatch, most_rows=3, step=3)
    assert run(folder, "again") == pytest.approx(undisturbed, rel=1e-5) and failed
    steps = events(folder, "again", "step")
    records = events(folder, "again", "recovery")
    assert steps[1]["batch_size_per_gpu"] == ROWS and steps[2]["batch_size_per_gpu"] <= 3
    assert len(records) == len(failed) and records[0]["step"] == 3
    assert "effective batch unchanged" in records[0]["report"]


def test_weights_that_are_changed_are_taken_back_from_the_last_checkpoint(folder, undisturbed, monkeypatch):
    failed = fail_above(monkeypatch, most_rows=4, step=5, after_updates=2)
    assert run(folder, "changed", weights_in="file") == pytest.approx(undisturbed, rel=1e-5)
    records = [e for e in events(folder, "changed", "recovery") if e["reason"] == "rolled back"]
    assert failed and [record["step"] for record in records] == [4] * len(failed)


def test_with_nothing_left_the_run_is_saved_and_says_what_helps(folder, monkeypatch):
    fail_above(monkeypatch, most_rows=0, step=4, flavour="python")
    with pytest.raises(DoesNotFit) as caught:
        LowMemTrainer(configuration(folder, "nothing_left", save_steps=100)).train()
    for part in ("phase train", "nothing more can be reduced", "--memory_budget", "step 3 is saved"):
        assert part in str(caught.value)
    assert (folder / "runs" / "nothing_left" / "checkpoints" / "step_00000003").is_dir()


def test_evaluations_and_answers_that_do_not_fit_go_on_with_fewer_rows_and_another_mode_gives_the_same_losses(
    folder, undisturbed, monkeypatch
):
    loss = Blockwise.loss
    sizes: list[int] = []

    def short_of_memory(blockwise, micro_batches, *rest):
        if len(micro_batches[0].source.lengths) > 1:
            raise MemoryError
        return loss(blockwise, micro_batches, *rest)

    def answer(live, free_bytes, of):
        sizes.append(free_bytes)
        if len(sizes) < 3:
            raise MemoryError
        return {}, []

    monkeypatch.setattr(Blockwise, "loss", short_of_memory)
    monkeypatch.setattr("training.evaluating.score_answers", answer)
    losses = run(folder, "short", memory_mode="ultra", batch_size_per_gpu=3, ultra_low_mem=True)
    assert losses == pytest.approx(undisturbed, rel=1e-5)
    records = events(folder, "short", "recovery")
    assert records[-1]["phase"] == "evaluation" and records[-1]["batch_size"] == 1
    losses = [[event["loss"] for event in events(folder, name, "eval")] for name in ("short", "undisturbed")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert sizes[0] > 0 and sizes[1:3] == [sizes[0] // 2, sizes[0] // 4]


# --- the looks, after steps whose memory a test scripts

CONFIG = load(
    "train",
    {
        "train_file": "x",
        "effective_batch_size": "16",
        "max_seq_len": "512",
        "vocab_size": "2048",
        "mixed_precision": "no",
        "weights_in": "device",
    },
)
LEAST = CONFIG.with_changes(effective_batch_size=1, memory_mode="ultra")
MARGIN = 32 * MIB
BUDGET = 2 * GIB


@cache
def plan_within(settings: StepSettings, limit: int, config: Config) -> Plan:
    return plan(config, Machine(limit, GIB), settings=settings)


def planned(settings: StepSettings, budget: Budget, config: Config = CONFIG) -> Plan:
    return plan_within(settings, budget.limit(), config)


def least_peak() -> int:
    return planned(StepSettings.of(LEAST), Budget(GIB, None, GIB, (), "", 0), LEAST).peak_bytes


def none_fits(settings: StepSettings, budget: Budget) -> Plan:
    raise DoesNotFit("no plan fits")


@dataclass(frozen=True)
class ScriptedBudget(Budget):
    """A budget beside which a test says what is held."""

    script: Any = None

    def used(self) -> int:
        return int(self.script.held_bytes)


class Scripted(ProcessTree):
    """A run of which a test says what its steps take, what it holds after them, and what limits it.

    Args:
        limit: the budget. by_user: whether it is a figure of the user's, without a margin; else a limit of the system
            less its margin.
        frees: bytes that each full cleaning gives back.
    """

    def __init__(
        self,
        limit: int,
        *,
        by_user: bool = False,
        config: Config = CONFIG,
        make_plan: Callable[[StepSettings, Budget], Plan] = planned,
        frees: int = 0,
    ) -> None:
        super().__init__()
        self.limit = limit
        self.by_user = by_user
        self.frees = frees
        self.seconds = 0.0
        self.steps = 0
        self.held_bytes = 0
        self.events = list[tuple[str, dict[str, Any]]]()
        self.monitor = Monitor(limit, FakeDevice(), processes=self)
        self.first = planned(StepSettings.of(config), self.measure(), config)
        self.first = replace(self.first, choice=replace(self.first.choice, malloc="fast"))
        self.fixed = sum(self.first.components[name] for name in ("base", "weights", "optimizer state"))
        self.controller = MemoryController(
            StepSettings.of(config),
            self.first,
            self.measure(),
            make_plan,
            self.measure,
            device=FakeDevice(),
            monitor=self.monitor,
            log=self,
            clock=lambda: self.seconds,
        )

    def measure(self) -> Budget:
        margin = 0 if self.by_user else max(MARGIN, int(self.limit / 0.95) - self.limit)
        available = self.limit + (GIB if self.by_user else margin)
        return ScriptedBudget(self.limit, None, available, (), "test group", margin, script=self)

    def usage(self) -> Usage:
        return Usage(self.held_bytes, 0)

    def event(self, name: str, sentence: str = "", /, **fields: Any) -> None:
        self.events.append((name, fields))
        if name == "cleanup":
            self.held_bytes -= self.frees

    def memory(self, step: int, phase: str) -> None:
        pass

    def plan(self, plan: Plan) -> None:
        pass

    def step(self, peak: int, level: int | None = None, times: int = 1) -> bool:
        """Take steps that hold no more than the plan after them, if nothing else is said; whether the last one changed
        the plan.
        """
        changed = False
        for _ in range(times):
            self.steps += 1
            self.seconds += 2.0
            for size in (peak, self.fixed if level is None else level):
                self.held_bytes = size
                self.monitor.sample("train")
            changed = self.controller.after_step(self.steps)
        return changed

    @property
    def reasons(self) -> list[str]:
        """Why it has become smaller, each time."""
        return [fields["reason"] for name, fields in self.events if name == "recovery"]

    @property
    def is_ended(self) -> bool:
        return self.controller.exhausted is not None


def test_a_lowered_limit_is_answered_once_by_the_fastest_plan_within_it() -> None:
    now = Scripted(BUDGET)
    now.limit = now.first.peak_bytes - 400 * MIB
    assert now.step(now.first.peak_bytes)
    smaller = now.controller.plan
    assert smaller.peak_bytes <= now.limit == smaller.budget_bytes
    assert smaller.effective_batch_size == now.first.effective_batch_size
    (report,) = [fields["report"] for name, fields in now.events if name == "recovery"]
    assert now.reasons == ["budget"] and "test group" in report and "effective batch unchanged" in report
    now.held_bytes = 2 * BUDGET
    now.monitor.sample("evaluation")
    assert not now.step(smaller.peak_bytes, times=5) and not now.is_ended, "what others hold is no peak of a step"
    stuck = Scripted(BUDGET)
    stuck.limit = now.limit
    assert stuck.step(stuck.first.peak_bytes, stuck.fixed + 40 * MIB)
    assert stuck.controller.plan.peak_bytes <= stuck.limit - 40 * MIB, "what is not given back counts against it"


def test_steps_that_take_more_than_planned_are_answered_by_what_they_took_and_once_more_if_need_be() -> None:
    now = Scripted(BUDGET)
    now.limit = now.first.peak_bytes - 50 * MIB
    assert now.step(now.fixed + int(1.2 * (now.first.peak_bytes - now.fixed)))
    second = now.controller.plan
    assert now.fixed + 1.2 * (second.peak_bytes - now.fixed) <= now.limit
    assert now.step(int(1.1 * now.limit)), "the next steps are over the limit all the same"
    assert now.controller.plan.peak_bytes < second.peak_bytes and not now.is_ended


@pytest.mark.parametrize(("lost", "ends"), [(20 * MIB, False), (60 * MIB, True)])
def test_a_run_that_cannot_shrink_uses_the_margin_and_ends_above_the_limit(lost: int, ends: bool) -> None:
    least = least_peak()
    now = Scripted(least + MIB, config=LEAST, make_plan=none_fits)
    now.limit = least - lost
    now.step(least, times=3)
    assert now.is_ended == ends and not now.reasons


@pytest.mark.parametrize(
    ("falls", "answered"),
    [
        ([90, 0, 0], None),  # A limit was lowered, once.
        ([60, 60, 0], 1),  # After two more steps there would be too little.
        ([90, 20, 10], None),  # It has slowed down.
    ],
)
def test_others_that_go_on_taking_make_the_run_smaller_before_they_have_taken_it(
    falls: list[int], answered: int | None
) -> None:
    now = Scripted(BUDGET)
    now.limit = now.first.peak_bytes + 180 * MIB
    now.step(now.first.peak_bytes)
    now.step(now.first.peak_bytes)
    changes = list[bool]()
    for fall in falls:
        now.limit -= fall * MIB
        changes.append(now.step(now.controller.plan.peak_bytes))
    assert changes == [turn == answered for turn in range(3)] and not now.is_ended


def test_pressure_is_answered_by_cleaning_first() -> None:
    now = Scripted(BUDGET, frees=100 * MIB)
    assert not now.step(BUDGET - MIB, BUDGET - MIB) and not now.reasons
    assert [fields["reason"] for name, fields in now.events if name == "cleanup"] == ["pressure"]
    stuck = Scripted(BUDGET)
    assert stuck.step(BUDGET - MIB, BUDGET - MIB) and stuck.reasons == ["pressure"] and not stuck.is_ended


@pytest.mark.parametrize(("level", "ends"), [(0, False), (BUDGET + MIB, True)])
def test_a_step_over_the_budget_makes_the_run_smaller_once_and_what_stays_ends_it(level: int, ends: bool) -> None:
    now = Scripted(BUDGET, by_user=True)
    assert now.step(2 * BUDGET, level) and now.reasons == ["pressure" if ends else "peak"]
    assert now.controller.plan.peak_bytes < now.first.peak_bytes
    assert not now.step(now.fixed, times=3) and len(now.reasons) == 1
    stuck = Scripted(BUDGET, by_user=True, make_plan=none_fits)
    assert not stuck.step(2 * BUDGET, level) and stuck.is_ended == ends


# --- growth, of a budget of 400 MiB


@pytest.mark.parametrize(("above_plan", "reasons"), [(MIB, ["growth"]), (-80 * MIB, [])])
def test_growth_beyond_the_plan_is_answered_before_the_budget_is_reached(above_plan: int, reasons: list[str]) -> None:
    """A heap that fills up to what was planned is left alone."""
    now = Scripted(BUDGET)
    now.limit = now.first.peak_bytes + 120 * MIB
    level = now.first.peak_bytes + above_plan
    draw = random.Random(0)
    while not now.reasons and now.steps < 120:
        level += MIB // 2
        now.step(level, level - 50 * MIB + draw.randrange(6 * MIB))
    assert now.reasons == reasons and now.monitor.peak_bytes < now.limit
