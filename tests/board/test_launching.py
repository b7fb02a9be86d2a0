"""Runs that are asked for wait, are started when they fit, and outlive the page. The program is a small stand-in."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from board.launching import Launcher
from board.planning import Planner, plan_words
from board.runs import run_facts
from settings.errors import UserError
from settings.loading import load
from support.units import GIB
from tests.board.recorded import beat, folders
from training.setup.resuming import resumed_config, run_to_resume

FITS = {"plan": {"peak_bytes": GIB, "budget_bytes": 4 * GIB}, "fits_now": True, "reserved_bytes": 0}
REFUSED = {"problems": ["--memory_budget = 1.00 GiB, is too small for this run"], "exit_code": 3, "fits_now": False}
WRONG = {"problems": ["--train_file = x, is empty"], "exit_code": 2, "fits_now": False}
RECORDER = (
    "import json, os, sys; open('started.json', 'w').write(json.dumps([sys.argv[1:], os.getsid(0) == os.getpid()]))"
)


@dataclass
class Planned(Planner):
    """A planner that answers what a test says."""

    answer: dict[str, Any] = field(default_factory=lambda: dict(FITS))
    requests: list[int] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None  # It is called while the planner plans.

    async def plan(self, flags: Any, reserved_bytes: int = 0, fresh_seconds: float = 0.0) -> dict[str, Any]:
        self.requests.append(reserved_bytes)
        self.meanwhile()
        return self.answer


class Queue:
    """A launcher with its planner, looked at from outside."""

    def __init__(self, folder: Path) -> None:
        self.where = folders(folder)
        self.planner = Planned(folder)
        self.launcher = Launcher(self.where, self.planner, folder, (sys.executable, "-c", RECORDER))

    def ask(self, name: str = "one", **flags: str) -> None:
        self.launcher.enqueue(name, "train", flags)

    def next(self, answer: dict[str, Any] | None = None) -> str | None:
        """Look at the queue, as the page does; what was started has ended by then."""
        self.planner.answer = answer or dict(FITS)
        started = asyncio.run(self.launcher.start_next())
        if started is not None:
            os.waitid(os.P_PID, self.record(started)["process"], os.WEXITED | os.WNOWAIT)
            self.launcher.count_ended()
        return started

    def record(self, name: str = "one") -> Any:
        return json.loads((self.where.log_dir / name / "launch.json").read_text())

    def facts(self, name: str = "one") -> tuple[str, str]:
        facts = run_facts(self.where, name)
        return facts["state"], facts["reason"]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setattr("board.launching.LOOK_AGAIN_SECONDS", 0.0)
    return Queue(tmp_path)


def test_a_run_that_fits_is_started_in_a_session_of_its_own(queue: Queue, tmp_path: Path) -> None:
    queue.ask(max_steps="5", source_prefix="a b; c")
    assert queue.facts() == ("waiting", "") and queue.next({**FITS, "reserved_bytes": GIB}) == "one"
    words, is_alone = json.loads((tmp_path / "started.json").read_text())
    assert is_alone, "a Ctrl-C for the page is none for the run"
    assert words[0] == "train" and {"--max_steps=5", "--source_prefix=a b; c", "--run_name=one"} <= set(words)
    assert "--memory_budget=4096M" in words, "what the others leave"
    assert queue.record()["exit_code"] == 0 and queue.record()["planned_peak_bytes"] == GIB


def test_one_that_does_not_fit_beside_others_waits(queue: Queue) -> None:
    beat(queue.where, "other", time=2e10, peak_bytes=3 * GIB, anon_bytes=GIB)
    queue.ask()
    for answer in ({**FITS, "fits_now": False, "reserved_bytes": 2 * GIB}, REFUSED):
        assert queue.next(answer) is None and queue.facts() == ("waiting", "other")
    assert queue.planner.requests == [2 * GIB] * 2 and queue.next() == "one"


def test_one_that_fits_nowhere_is_refused_after_a_while(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has just ended holds its memory a moment longer, a talk on the page for some minutes."""
    queue.ask()
    assert queue.next(REFUSED) is None and queue.facts()[0] == "waiting"
    monkeypatch.setattr("board.launching.PATIENCE_SECONDS", 0.0)
    assert queue.next(REFUSED) is None and queue.facts() == ("failed", REFUSED["problems"][0])  # type: ignore[index]
    assert queue.next() is None, "it is not tried again"
    queue.ask("two")
    assert queue.next(WRONG) is None and queue.facts("two") == ("failed", WRONG["problems"][0])  # type: ignore[index]


def test_the_queue_is_of_files_the_oldest_comes_first_and_may_be_withdrawn(queue: Queue, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        queue.ask(name)
    queue.launcher.withdraw("b")
    assert not (queue.where.log_dir / "b").exists()
    other = Queue(tmp_path)  # The page was started anew.
    assert [other.next(), queue.next(), other.next()] == ["a", "c", None]


@pytest.mark.parametrize("meanwhile", ["withdrawn", "asked anew"])
def test_a_run_that_was_taken_back_while_it_was_planned_is_not_started(queue: Queue, meanwhile: str) -> None:
    queue.ask(max_steps="5")

    def act() -> None:
        queue.launcher.withdraw("one")
        if meanwhile == "asked anew":
            queue.ask(max_steps="6")

    queue.planner.meanwhile = act
    assert queue.next() is None and not (queue.launcher.folder / "started.json").exists()
    assert (queue.where.log_dir / "one").exists() == (meanwhile == "asked anew")


def test_the_queue_outlives_an_error(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([KeyError("step"), OSError("full"), asyncio.CancelledError()])

    def fail() -> None:
        raise next(errors)

    queue.ask()
    queue.planner.meanwhile = fail
    monkeypatch.setattr("board.launching.QUEUE_SECONDS", 0.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(queue.launcher.work())


def test_what_may_be_resumed(queue: Queue) -> None:
    with pytest.raises(UserError, match="no checkpoint"):
        queue.ask(is_keep_training="True")
    (queue.where.output_dir / "one").mkdir()
    beat(queue.where, "one", time=2e10)
    with pytest.raises(UserError, match="exists"):
        queue.ask(is_keep_training="True")
    beat(queue.where, "one", "stopped", started=1.0)
    queue.ask(is_keep_training="True")
    assert queue.facts()[0] == "waiting"


def test_a_run_is_planned_with_the_settings_that_it_will_have(queue: Queue) -> None:
    words = plan_words({"max_steps": "5", "port": "1", "train_file": "x", "run_name": "one"})
    assert set(words) == {"--max_steps=5", "--train_file=x", "--run_name=one"}, "flags that plan knows"
    assert "--preset=sample" in plan_words({}), "as train without a file"
    config = load("train", {"train_file": "rows.jsonl", "model_preset": "tiny", "num_layers": "3", "max_steps": "7"})
    (queue.where.output_dir / "one").mkdir()
    (queue.where.output_dir / "one" / "settings.json").write_text(json.dumps(config.as_dict()))
    queue.ask(is_keep_training="True", max_steps="9")
    words = plan_words(queue.record()["flags"])
    config = load("plan", dict(word.removeprefix("--").split("=", 1) for word in words))
    run_dir = run_to_resume(config.run, is_keep_training=True)
    assert run_dir is not None
    planned = resumed_config(config, run_dir)
    assert (planned.data.train_file, planned.model.num_layers, planned.train.max_steps) == ("rows.jsonl", 3, 9)


PLANNER = """
import json, sys
budget = next((int(w.split('=')[1][:-1]) * 2**20 for w in sys.argv if w.startswith('--memory_budget=')), 8 * 2**30)
if budget < 2 * 2**30:
    sys.exit(print('plan: does not fit the memory budget\\n  --memory_budget, too little', file=sys.stderr) or 3)
machine = {'available_bytes': 8 * 2**30, 'has_own_memory': '--device=cuda' in sys.argv}
print(json.dumps({'plan': {'peak_bytes': 2 * 2**30, 'budget_bytes': budget}, 'machine': machine}))
"""


def test_others_are_planned_beside_and_a_refusal_brings_its_reasons(tmp_path: Path) -> None:
    planner = Planner(tmp_path, (sys.executable, "-c", PLANNER))
    for reserved, fits, budget in ((0, True, 8), (3, True, 5), (7, False, 8)):
        plan = asyncio.run(planner.plan({}, reserved * GIB))
        assert plan["fits_now"] is fits and plan["plan"]["budget_bytes"] == budget * GIB
    assert not asyncio.run(planner.plan({"device": "cuda"}, GIB))["fits_now"]
    refusal = asyncio.run(planner.plan({"memory_budget": "1000M"}))
    assert (refusal["exit_code"], refusal["problems"]) == (3, ["--memory_budget, too little"])
