"""Runs that are asked for wait, are started when they fit, and outlive the page. The program is a small stand-in."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from board import planning
from board.launching import Launcher
from board.planning import Planner, plan_words, still_to_take
from board.reader import Outside
from board.runs import run_facts
from board.service import Board
from common.units import GIB
from settings.errors import UserError
from settings.loading import load
from tests.board.recorded import beat, folders
from training.setup.resuming import resumed_config, run_to_resume

FITS = {"plan": {"peak_bytes": GIB, "budget_bytes": 4 * GIB}, "fits_now": True, "reserved_bytes": 0}
REFUSED = {"problems": ["--memory_budget = 1.00 GiB, does not hold this run"], "exit_code": 3, "fits_now": False}
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

    def __init__(self, folder: Path, program: str = RECORDER) -> None:
        self.where = folders(folder)
        self.planner = Planned(folder)
        self.launcher = Launcher(self.where, self.planner, folder, (sys.executable, "-c", program))

    def ask(self, name: str = "one", **flags: str) -> None:
        self.launcher.ask(name, "train", flags)

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


@pytest.mark.parametrize(
    "name",
    ["other", pytest.param("m\udcfe", marks=pytest.mark.skipif(sys.platform != "linux", reason="names are any bytes"))],
)
def test_one_that_does_not_fit_beside_others_waits(queue: Queue, name: str) -> None:
    beat(queue.where, name, time=2e10, peak_bytes=3 * GIB, anon_bytes=GIB)
    queue.ask()
    for answer in ({**FITS, "fits_now": False, "reserved_bytes": 2 * GIB}, REFUSED):
        assert queue.next(answer) is None and queue.facts() == ("waiting", name)
    assert queue.planner.requests == [2 * GIB] * 2 and queue.next() == "one"


def test_while_nothing_has_changed_the_queue_plans_seldom(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes of the processor on which the others train."""
    monkeypatch.setattr("board.launching.LOOK_AGAIN_SECONDS", 30.0)
    for name in ("other", "third"):
        beat(queue.where, name, time=2e10)
    queue.ask()
    assert [queue.next(REFUSED) for _ in range(9)] == [None] * 9 and len(queue.planner.requests) == 1
    beat(queue.where, "third", state="done")
    assert queue.next() == "one" and len(queue.planner.requests) == 2, "one has ended: there may be room"


def test_what_runs_already_is_not_started_again(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch may say that it waits: it was begun from a terminal, or the disk was full when it was noted."""
    queue.ask()
    beat(queue.where, "one", time=time.time(), started=time.time() + 1)
    assert queue.next() is None and not queue.planner.requests
    queue.launcher.program = (sys.executable, "-c", "import time; time.sleep(60)")
    queue.ask("two")

    def full(path: Path, text: str) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("board.launching.write_text", full)
    with pytest.raises(OSError, match="full"):
        queue.next()
    for child in psutil.Process().children():  # It is ended: nobody would know of it.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    queue.launcher.count_ended()


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


@pytest.mark.parametrize("meanwhile", ["withdrawn", "deleted", "asked anew"])
def test_a_run_that_was_taken_back_while_it_was_planned_is_not_started(queue: Queue, meanwhile: str) -> None:
    queue.ask(max_steps="5")

    def act() -> None:
        queue.launcher.delete("one") if meanwhile == "deleted" else queue.launcher.withdraw("one")
        if meanwhile == "asked anew":
            queue.ask(max_steps="6")

    queue.planner.meanwhile = act
    assert queue.next() is None and not (queue.launcher.folder / "started.json").exists()
    assert (queue.where.log_dir / "one").exists() == (meanwhile == "asked anew")


def test_of_many_who_ask_for_one_name_one_gets_it(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(queue.ask, "one", max_steps=str(steps)) for steps in range(1, 9)]
    problems = [one.exception() for one in futures]
    assert sum(problem is None for problem in problems) == 1
    steps = queue.record()["flags"]["max_steps"]
    assert steps == str(problems.index(None) + 1)
    other = Queue(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # Another page has looked before.
    with pytest.raises(UserError, match="--run_name"):
        other.ask(max_steps="99")
    assert queue.record()["flags"]["max_steps"] == steps


def test_a_run_that_is_given_no_name_gets_its_kind_and_the_time(tmp_path: Path) -> None:
    board = Board(folders(tmp_path), tmp_path)
    names = [board.start({"run_name": name}) for name in ("AUTO", " Auto ", "")]
    assert {folder.name for folder in board.folders.log_dir.iterdir()} == {*names} and len({*names}) == 3
    assert all(re.fullmatch(r"pretrain_[0-9]{8}_[0-9]{6}(_[23])?", name) for name in names)
    (board.folders.output_dir / "run_2").mkdir()
    assert [board.launcher.ask_anew("run", "train", {}) for _ in range(2)] == ["run", "run_3"]


def test_a_launch_that_somebody_else_has_written_is_passed_over(queue: Queue) -> None:
    (queue.where.log_dir / "one").mkdir()
    flags = '{"command": "train", "flags": {}, "asked": "x"}'
    for content in ("[]", '{"flags": 5}', '{"command": "rm", "flags": {}, "asked": 1}', flags):
        (queue.where.log_dir / "one" / "launch.json").write_text(content)
        assert queue.next() is None and not queue.planner.requests


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


def test_wishes_go_to_runs_alone(queue: Queue) -> None:
    for name in ("none", "../x"):
        with pytest.raises(Outside):
            queue.launcher.wish(name, "stop")


def test_what_others_may_still_take() -> None:
    runs = [
        {"state": "running", "planned_peak_bytes": 10, "peak_bytes": 12, "memory_bytes": 5},
        {"state": "starting", "planned_peak_bytes": 10, "peak_bytes": None, "memory_bytes": None},
        {"state": "running", "planned_peak_bytes": 4, "peak_bytes": 4, "memory_bytes": 9},
        {"state": "done", "planned_peak_bytes": 99, "peak_bytes": 99, "memory_bytes": 0},
    ]
    assert still_to_take(runs) == 7 + 10


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


def test_a_plan_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PLAN_SECONDS", 0.2)
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(Planner(tmp_path, (sys.executable, "-c", "import threading; threading.Event().wait()")).plan({}))
    children = [child.cmdline() for child in psutil.Process().children()]
    assert not any("threading.Event().wait()" in " ".join(words) for words in children)
