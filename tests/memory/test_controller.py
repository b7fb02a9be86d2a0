"""A run that is short of memory sees the same rows and gives the same losses as one that is not."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import devices
from engine.blockwise import Blockwise
from memory import controller as controlling
from memory.budget import Budget
from memory.controller import THIRDS, Growth, MemoryController, bytes_ahead
from memory.estimate import peaks
from memory.estimate.workload import Machine
from memory.plan import Plan, plan
from settings.errors import DoesNotFit
from settings.loading import load
from tests.end_to_end.running import write_text
from tests.fake_device import OUT_OF_MEMORY
from tests.training.small_runs import configuration, events
from trainer_low_mem import LowMemTrainer
from units import GIB, KIB, MIB

STEPS, ROWS = 6, 8  # of a run of `small_runs`


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("controller")
    write_text(place / "text.txt")
    return place


def run(folder: Path, name: str, **flags: object) -> list[float]:
    LowMemTrainer(configuration(folder, name, **flags)).train()
    steps = events(folder, name, "step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    return [event["loss"] for event in steps]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[float]:
    return run(folder, "undisturbed")


class Short:
    """Lets a pass fail while a micro-batch has more rows than fit, from one step on.

    Args:
        flavour: of the error. most_rows: that fit. step: the first that may fail.
        after_updates: weights that are handed over before it fails.
    """

    def __init__(self, flavour: str, most_rows: int, step: int, after_updates: int = 0) -> None:
        self.flavour, self.most_rows, self.step, self.after_updates = flavour, most_rows, step, after_updates
        self.passes = self.failures = 0
        self.gradients = Blockwise.gradients

    def __call__(self, blockwise, micro_batches, total_labels, update, *rest, **named):
        self.passes += 1
        handed_over, plain = 0, update.apply

        def failing(weights):
            nonlocal handed_over
            if handed_over == self.after_updates:
                self.failures += 1
                raise OUT_OF_MEMORY[self.flavour](2**30)
            handed_over += 1
            plain(weights)

        most = max(len(micro_batch.source.lengths) for micro_batch in micro_batches)
        if most > self.most_rows and self.passes >= self.step:
            update.apply = failing
        try:
            return self.gradients(blockwise, micro_batches, total_labels, update, *rest, **named)
        finally:
            update.apply = plain


def put_in(monkeypatch: pytest.MonkeyPatch, short: Short) -> None:
    monkeypatch.setattr(Blockwise, "gradients", lambda blockwise, *args, **named: short(blockwise, *args, **named))


def test_the_same_step_runs_again_in_a_smaller_way(folder, undisturbed, monkeypatch):
    short = Short("cpu", most_rows=3, step=3)
    put_in(monkeypatch, short)
    assert run(folder, "again") == pytest.approx(undisturbed, rel=1e-5) and short.failures >= 1
    steps, records = events(folder, "again", "step"), events(folder, "again", "recovery")
    assert steps[1]["batch_size_per_gpu"] == ROWS and steps[2]["batch_size_per_gpu"] <= 3
    assert (
        len(records) == short.failures
        and records[0]["step"] == 3
        and "effective batch unchanged" in records[0]["report"]
    )


def test_weights_that_are_changed_are_taken_back_from_the_last_checkpoint(folder, undisturbed, monkeypatch):
    short = Short("cpu", most_rows=4, step=5, after_updates=2)
    put_in(monkeypatch, short)
    assert run(folder, "changed") == pytest.approx(undisturbed, rel=1e-5)
    records = [e for e in events(folder, "changed", "recovery") if e["reason"] == "rolled back"]
    assert short.failures >= 1 and [record["step"] for record in records] == [4] * short.failures


def test_with_nothing_left_the_run_is_saved_and_says_what_helps(folder, monkeypatch):
    put_in(monkeypatch, Short("python", most_rows=0, step=4))
    with pytest.raises(DoesNotFit) as caught:
        LowMemTrainer(configuration(folder, "nothing_left", save_steps=100)).train()
    for part in ("phase train", "nothing more can be reduced", "--memory_budget", "step 3 is saved"):
        assert part in str(caught.value)
    assert (folder / "runs" / "nothing_left" / "checkpoints" / "step_00000003").is_dir()


def test_an_evaluation_that_does_not_fit_goes_on_with_fewer_rows(folder, undisturbed, monkeypatch):
    loss = Blockwise.loss

    def short(blockwise, micro_batches, *rest):
        if len(micro_batches[0].source.lengths) > 1:
            raise MemoryError
        return loss(blockwise, micro_batches, *rest)

    monkeypatch.setattr(Blockwise, "loss", short)
    assert run(folder, "evaluation") == undisturbed
    records = events(folder, "evaluation", "recovery")
    assert records[-1]["phase"] == "evaluation" and records[-1]["batch_size"] == 1
    ours, theirs = ([e["loss"] for e in events(folder, name, "eval")] for name in ("evaluation", "undisturbed"))
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_budget_that_shrinks_is_planned_for_again(folder, undisturbed, monkeypatch):
    measured = controlling.measure_budget
    now = []

    def lowered(*args, **named):
        budget, planned = measured(*args, **named), events(folder, "lowered", "plan")[0]
        now.append(replace(budget, host_bytes=planned["peak_bytes"] - 2**20, binding="test group", margin_bytes=0))
        return now[-1]

    monkeypatch.setattr(controlling, "measure_budget", lowered)
    monkeypatch.setattr(controlling, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(controlling, "SETTLED_STEPS", 10**9)
    monkeypatch.setattr(
        controlling.Monitor, "plan_pressure", lambda self: 0.5
    )  # what tests before this one hold is not its matter
    for name in ("LOAD_BYTES", "SAVE_BYTES"):  # more than all that this small model's steps take
        monkeypatch.setattr(peaks, name, 0)
    assert run(folder, "lowered") == pytest.approx(undisturbed, rel=1e-5)
    records, plans = events(folder, "lowered", "recovery"), events(folder, "lowered", "plan")
    assert [record["reason"] for record in records] == ["budget"] and "test group" in records[0]["report"]
    assert plans[-1]["peak_bytes"] <= now[-1].host_bytes < plans[0]["peak_bytes"]


def test_pressure_that_stays_after_cleaning_makes_the_run_smaller(folder, undisturbed, monkeypatch):
    monkeypatch.setattr(controlling.Monitor, "plan_pressure", lambda self: 0.99)
    assert run(folder, "pressed") == pytest.approx(undisturbed, rel=1e-5)
    assert [e["reason"] for e in events(folder, "pressed", "recovery")][:1] == ["pressure"]
    assert [e["reason"] for e in events(folder, "pressed", "cleanup")].count("pressure") >= 1


def test_ram_beside_a_gpu_is_cleaned_and_changes_no_plan(folder, undisturbed, monkeypatch):
    monkeypatch.setattr(controlling.Monitor, "pressure", lambda self: 1.2)
    monkeypatch.setattr(controlling.Monitor, "plan_pressure", lambda self: 0.3)
    assert run(folder, "beside") == pytest.approx(undisturbed, rel=1e-5)
    assert not events(folder, "beside", "recovery")
    assert [e["reason"] for e in events(folder, "beside", "cleanup")].count("pressure") >= 1


def test_a_step_over_the_budget_makes_the_run_smaller(folder, undisturbed, monkeypatch):
    """Whatever the plan said; once."""
    after_step = MemoryController.after_step

    def over(controller: MemoryController, step: int) -> bool:
        if step == 3:
            controller._monitor.counted_peak_bytes, controller._monitor.counted_phase = (
                2 * controller.plan.budget_bytes,
                "train",
            )
        return after_step(controller, step)

    monkeypatch.setattr(MemoryController, "after_step", over)
    assert run(folder, "over") == pytest.approx(undisturbed, rel=1e-5)
    records = events(folder, "over", "recovery")
    assert [record["reason"] for record in records] == ["peak"]
    assert all(record["step"] == 3 and "exceeded the budget of" in record["report"] for record in records)


def test_answers_that_do_not_fit_are_written_fewer_at_once(folder, undisturbed, monkeypatch):
    asked: list[int] = []

    def short(live, free_bytes, of):
        asked.append(free_bytes)
        if len(asked) < 3:
            raise MemoryError
        return {}, []

    monkeypatch.setattr("training.evaluating.score_answers", short)
    assert run(folder, "answers") == undisturbed
    assert asked[0] > 0 and asked[1:3] == [asked[0] // 2, asked[0] // 4]


def test_another_memory_mode_gives_the_same_losses(folder, undisturbed):
    losses = run(folder, "ultra", memory_mode="ultra", batch_size_per_gpu=3, ultra_low_mem=True)
    assert losses == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.parametrize("is_within_plan", [False, True])
def test_growth_is_told_cleaned_and_answered_by_a_smaller_plan(folder, undisturbed, monkeypatch, capfd, is_within_plan):
    """Every step holds more than the one before: the run cleans, and where that does not help takes a smaller plan.

    A heap that fills up to what was planned is left alone.
    """
    name = f"grows_{is_within_plan}"
    held = (GIB, 2 * GIB if is_within_plan else MIB)
    monkeypatch.setattr(MemoryController, "_step_peaks", lambda self: held)
    monkeypatch.setattr(controlling, "THIRDS", (1,))
    shares = iter(0.3 + 0.1 * step for step in range(100))
    monkeypatch.setattr(
        controlling.Growth,
        "after_step",
        lambda self, held, peak, inner=Growth.after_step: inner(self, next(shares), peak),
    )
    monkeypatch.setattr(controlling, "FORESIGHT", 10**9)
    losses = run(folder, name, max_steps=STEPS)
    assert losses == pytest.approx(undisturbed, rel=1e-5)
    records = [event for event in events(folder, name, "recovery") if event["reason"] == "growth"]
    told = capfd.readouterr()
    if is_within_plan:
        assert not records and "would reach the budget in" not in told.out + told.err
        return
    (record,) = records
    assert record["step"] == 6 and "memory still grows" in record["report"]
    assert (told.out + told.err).count("would reach the budget in") == 2


# --- the looks

MARGIN = 32 * MIB


def looking(
    monkeypatch: pytest.MonkeyPatch, now: Plan, budget: Budget, tried: list[int] | None = None, **held: Any
) -> MemoryController:
    """A controller of a run that no other plan fits, and whose memory is as told; `tried`: takes the budgets that it asks for."""

    def none_fits(config: Any, budget: Budget) -> Any:
        (tried if tried is not None else []).append(budget.limit())
        raise DoesNotFit("no way fits")

    monkeypatch.setattr(controlling, "LOOK_SECONDS", 0.0)
    facts = {"peak_bytes": 0, "counted_peak_bytes": 0, "counted_phase": "train", "phase_peaks": {}, **held}
    monitor: Any = SimpleNamespace(
        watch=lambda budget_bytes, from_now: None,
        pressure=lambda: 0.0,
        plan_pressure=lambda: 0.0,
        budget_bytes=budget.host_bytes,
        **facts,
    )
    log: Any = SimpleNamespace(tell=lambda text: None)
    return MemoryController(CONFIG, now, budget, none_fits, device=devices.pick("cpu", 0), monitor=monitor, log=log)


CONFIG = load("train", {"train_file": "x", "effective_batch_size": "1", "max_seq_len": "64", "memory_mode": "ultra"})


@pytest.mark.parametrize(("lost", "ends"), [(5 * MIB, False), (60 * MIB, True)])
def test_drift_is_no_smaller_budget(monkeypatch: pytest.MonkeyPatch, lost: int, ends: bool) -> None:
    least = plan(CONFIG, Machine(4 * GIB, GIB))
    budget = Budget(least.peak_bytes, None, GIB, (), "cgroup", MARGIN)
    monkeypatch.setattr(controlling, "measure_budget", lambda *_: replace(budget, host_bytes=budget.host_bytes - lost))
    controller = looking(monkeypatch, replace(least, budget_bytes=budget.host_bytes), budget)
    controller.after_step(1)
    assert (controller.exhausted is not None) == ends


@pytest.mark.parametrize(
    ("looks", "seconds", "left"),
    [
        ([(0.0, 700)], 10.0, 700),
        ([(0.0, 700), (5.0, 640)], 10.0, 640),
        ([(0.0, 700), (5.0, 640), (10.0, 580)], 10.0, 460),  # 12 a second
        ([(0.0, 700), (5.0, 640), (10.0, 630)], 10.0, 610),  # it has slowed down
        ([(0.0, 700), (5.0, 300), (10.0, 300)], 10.0, 300),  # a limit was lowered, once
        ([(0.0, 700), (5.0, 640), (10.0, 690)], 10.0, 690),  # it has been given back
        ([(5.0, 700), (5.0, 640), (5.0, 580)], 10.0, 580),
    ],
)
def test_what_others_will_leave_follows_from_three_looks(
    looks: list[tuple[float, int]], seconds: float, left: int
) -> None:
    assert bytes_ahead(looks, seconds) == left


@pytest.mark.parametrize(
    ("pace", "shrinks", "ends"),
    [(0, False, False), (5 * MIB, True, False), (6 * MIB, True, True), (12 * MIB, True, True)],
)
def test_others_that_go_on_taking_make_the_run_smaller_before_they_have_taken_it(
    monkeypatch: pytest.MonkeyPatch, pace: int, shrinks: bool, ends: bool
) -> None:
    """At 5 seconds a step there is room after two of them, and none after two more.

    Where no plan fits, not even with what is left without a margin, the run ends as long as it can still be saved.
    """
    least = plan(CONFIG, Machine(4 * GIB, GIB))
    seconds, tried = [0.0], list[int]()
    enough = least.peak_bytes + 60 * MIB

    def budget_now(*_: Any) -> Budget:
        left = int(enough + MARGIN - pace * seconds[0])
        return Budget(left - MARGIN, None, left, (), "cgroup", MARGIN)

    monkeypatch.setattr(controlling, "measure_budget", budget_now)
    monkeypatch.setattr(controlling, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    controller = looking(monkeypatch, replace(least, budget_bytes=budget_now().host_bytes), budget_now(), tried=tried)
    for step in (1, 2):
        assert not tried
        seconds[0] += 5.0
        controller.after_step(step)
    ahead = budget_now().available_bytes - int(pace * 10.0)
    assert set(tried) == ({ahead - MARGIN, ahead} if shrinks else set())
    assert (controller.exhausted is not None) == ends


@pytest.mark.parametrize(
    ("budget", "margin", "peak", "is_over"),
    [
        (600, 32, 590, False),
        (600, 32, 610, True),  # nobody has lowered it
        (500, 32, 520, False),  # others have: the margin below their limit is used
        (500, 32, 540, True),
        (500, 0, 510, True),  # a figure of the user's has none
        (590, 32, 610, True),  # over what it began with
    ],
)
def test_a_margin_below_a_limit_that_others_have_lowered_may_be_used(
    monkeypatch: pytest.MonkeyPatch, budget: int, margin: int, peak: int, is_over: bool
) -> None:
    first = replace(plan(CONFIG, Machine(4 * GIB, GIB)), budget_bytes=600 * MIB)
    limits = Budget(budget * MIB, None, (budget + margin) * MIB, (), "cgroup", margin * MIB)
    monkeypatch.setattr(controlling, "measure_budget", lambda *_: limits)
    controller = looking(monkeypatch, first, limits, counted_peak_bytes=peak * MIB)
    controller.plan = replace(first, budget_bytes=budget * MIB)
    controller.after_step(7)
    assert controller.first_over == (7 if is_over else None)
    assert controller.over_bytes == (peak * MIB if peak > budget else 0)


@pytest.mark.parametrize(("steps", "of_budget", "trims"), [(1.0, 0.9, False), (1.2, 0.2, False), (1.2, 0.9, True)])
def test_a_heap_is_trimmed_where_steps_outgrow_their_plan_near_the_budget(
    monkeypatch: pytest.MonkeyPatch, steps: float, of_budget: float, trims: bool
) -> None:
    """What other phases have held, such as the training of a tokenizer, says nothing of the steps."""
    least = plan(CONFIG, Machine(64 * GIB, GIB))
    now = replace(least, choice=replace(least.choice, malloc="untrimmed"))
    peak = int(steps * now.step_peak_bytes)
    budget = Budget(int(peak / of_budget), None, GIB, (), "cgroup", MARGIN)
    monkeypatch.setattr(controlling, "measure_budget", lambda *_: budget)
    held = {"peak_bytes": 2 * peak, "phase_peaks": {"prepare": 2 * peak, "train": peak}}
    controller = looking(monkeypatch, replace(now, budget_bytes=budget.host_bytes), budget, **held)
    assert controller.after_step(1) == trims == (controller.plan.choice.malloc == "fast")


BUDGET, LEVEL, STEP_BYTES = 400 * MIB, 298 * MIB, 60 * MIB  # of a run of short rows, as it was seen
NOISE = 6 * MIB


def seen(shares: Iterable[float], beyond: float = 0.1, first_peak: float = 0.0) -> list[int]:
    """The steps after which growth was found; a step's own peak is `beyond` what is held after it."""
    growth, peak, found = Growth(), first_peak, []
    for step, share in enumerate(shares, 1):
        peak = max(peak, share + beyond)
        if growth.after_step(share, peak) > 0:
            found.append(step)
    return found


def levels(draw: random.Random, steps: int, pace: float = 0.0, keeps: float = 0.0) -> Iterator[float]:
    """Shares of the budget: a level, noise of which the share `keeps` stays until the next step, and growth."""
    noise = 0.0
    for step in range(steps):
        noise = keeps * noise + (1 - keeps) * draw.uniform(-NOISE, NOISE)
        yield (LEVEL + noise + pace * step) / BUDGET


def test_steady_growth_is_found_after_three_windows() -> None:
    assert seen([0.3 + 0.002 * step for step in range(40)]) == [3 * THIRDS[0], 4 * THIRDS[0], 5 * THIRDS[0]]


@pytest.mark.parametrize("seed", range(2))
def test_what_comes_and_goes_is_no_growth(seed: int) -> None:
    draw = random.Random(seed)
    assert seen([0.5 + draw.choice((0.0, 0.0, 0.2, 0.3)) for _ in range(400)]) == []


@pytest.mark.parametrize("seed", range(2))
def test_noise_around_a_level_is_no_growth_over_thousands_of_steps(seed: int) -> None:
    """Peaks that noise itself raises, and one that was there before."""
    for first_peak in (0.0, 364.1 * MIB / BUDGET):
        assert seen(levels(random.Random(seed), 3000), STEP_BYTES / BUDGET, first_peak) == []


@pytest.mark.parametrize("seed", range(2))
def test_slow_growth_within_noise_is_told_before_the_budget(seed: int) -> None:
    pace = 250 * KIB
    steps = (BUDGET - LEVEL - NOISE - STEP_BYTES) // pace  # until the budget is met
    found = seen(levels(random.Random(seed), steps, pace), STEP_BYTES / BUDGET)
    assert found and found[0] <= 12 * THIRDS[0]
