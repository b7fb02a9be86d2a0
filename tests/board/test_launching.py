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

import pytest

from board import planning
from board.launching import Launcher
from board.places import Outside, Places
from board.planning import Planner, plan_words, still_to_take
from board.runs import run_facts
from board.service import Board
from config import UserError, load
from tests.board.recorded import beat, places, start, write
from training.start.resuming import find_run_to_resume, resumed_config

GIB = 2**30
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
    asked: list[int] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None  # what happens while it plans

    async def plan(self, flags: Any, reserved_bytes: int = 0, fresh_seconds: float = 0.0) -> dict[str, Any]:
        self.asked.append(reserved_bytes)
        self.meanwhile()
        return self.answer


def launcher(folder: Path, program: str = RECORDER) -> tuple[Launcher, Planned, Places]:
    where, planner = places(folder), Planned(folder)
    return Launcher(where, planner, folder, (sys.executable, "-c", program)), planner, where


def record(where: Places, name: str) -> Any:
    return json.loads((where.log_dir / name / "launch.json").read_text())


def test_a_run_that_fits_is_started_in_a_session_of_its_own(tmp_path: Path) -> None:
    launching, _, where = launcher(tmp_path)
    launching.ask("one", "train", {"max_steps": "5", "source_prefix": "a b; c"})
    assert run_facts(where, "one")["state"] == "waiting"
    assert asyncio.run(launching.start_next()) == "one"
    launching._children["one"].wait()
    words, is_alone = json.loads((tmp_path / "started.json").read_text())
    assert is_alone, "a Ctrl-C for the page is none for the run"
    assert words[0] == "train" and {"--max_steps=5", "--source_prefix=a b; c", "--run_name=one"} <= set(words)
    launching.count_ended()
    assert record(where, "one")["exit_code"] == 0 and record(where, "one")["planned_peak_bytes"] == GIB


def test_one_that_does_not_fit_beside_others_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("board.launching.LOOK_AGAIN_SECONDS", 0.0)
    launching, planner, where = launcher(tmp_path)
    write(where, "other", start())
    beat(where, "other", time=2e10, peak_bytes=3 * GIB, anon_bytes=GIB)
    launching.ask("one", "train", {})
    planner.answer = {**FITS, "fits_now": False, "reserved_bytes": 2 * GIB}
    assert asyncio.run(launching.start_next()) is None
    facts = run_facts(where, "one")
    assert (facts["state"], facts["reason"]) == ("waiting", "other") and planner.asked == [2 * GIB]
    planner.answer = REFUSED
    assert asyncio.run(launching.start_next()) is None and run_facts(where, "one")["state"] == "waiting"
    planner.answer = dict(FITS)
    assert asyncio.run(launching.start_next()) == "one"
    launching._children["one"].wait()


def test_while_nothing_has_changed_the_queue_plans_seldom(tmp_path: Path) -> None:
    """A plan takes of the processor on which the others train."""
    launching, planner, where = launcher(tmp_path)
    for name in ("other", "third"):
        write(where, name, start())
        beat(where, name, time=2e10)
    launching.ask("one", "train", {})
    planner.answer = REFUSED
    for _ in range(9):
        assert asyncio.run(launching.start_next()) is None
    assert len(planner.asked) == 1
    beat(where, "third", state="done")
    planner.answer = dict(FITS)
    assert asyncio.run(launching.start_next()) == "one" and len(planner.asked) == 2, "one has ended: there may be room"
    launching._children["one"].wait()


def test_what_runs_already_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch may say that it waits: it was begun from a terminal, or the disk was full when it was noted."""
    launching, planner, where = launcher(tmp_path, program="import time; time.sleep(60)")
    launching.ask("one", "train", {})
    beat(where, "one", time=time.time(), started=time.time() + 1)
    assert asyncio.run(launching.start_next()) is None and not planner.asked
    launching.ask("two", "train", {})

    def full(name: str, record: dict[str, Any]) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(launching, "_write", full)
    with pytest.raises(OSError, match="full"):
        asyncio.run(launching.start_next())
    assert launching._children["two"].wait(60) != 0, "it is ended: nobody would know of it"


@pytest.mark.skipif(sys.platform != "linux", reason="names are any bytes")
def test_a_run_whose_name_is_no_text_is_waited_for_and_started_by_nobody(tmp_path: Path) -> None:
    launching, planner, where = launcher(tmp_path)
    (where.log_dir / "m\udcfe").mkdir()
    (where.log_dir / "m\udcfe" / "launch.json").write_text('{"command": "train", "flags": {}, "asked": 1}')
    assert asyncio.run(launching.start_next()) is None and not planner.asked
    beat(where, "m\udcfe", time=2e10, started=2e9)
    launching.ask("one", "train", {})
    planner.answer = REFUSED
    assert asyncio.run(launching.start_next()) is None
    assert run_facts(where, "one")["reason"] == "m\udcfe" and run_facts(where, "one")["state"] == "waiting"


def test_memory_that_is_short_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has just ended holds its memory a moment longer, a talk on the page for some minutes."""
    launching, planner, where = launcher(tmp_path)
    launching.ask("one", "train", {})
    monkeypatch.setattr("board.launching.LOOK_AGAIN_SECONDS", 0.0)
    planner.answer = REFUSED
    for _ in range(3):
        assert asyncio.run(launching.start_next()) is None
        assert run_facts(where, "one")["state"] == "waiting"
    planner.answer = dict(FITS)
    assert asyncio.run(launching.start_next()) == "one"
    launching._children["one"].wait()


@pytest.mark.parametrize("answer", [REFUSED, WRONG])
def test_one_that_fits_nowhere_or_is_wrong_is_refused_with_the_reasons(
    tmp_path: Path, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("board.launching.PATIENCE_SECONDS", 0.0)
    launching, planner, where = launcher(tmp_path)
    launching.ask("one", "train", {})
    planner.answer = answer
    assert asyncio.run(launching.start_next()) is None
    facts = run_facts(where, "one")
    assert (facts["state"], facts["reason"]) == ("failed", answer["problems"][0])
    assert asyncio.run(launching.start_next()) is None, "it is not tried again"


def test_beside_others_it_gets_what_is_left_as_its_budget(tmp_path: Path) -> None:
    launching, planner, where = launcher(tmp_path)
    launching.ask("one", "train", {})
    planner.answer = {**FITS, "reserved_bytes": GIB}
    asyncio.run(launching.start_next())
    launching._children["one"].wait()
    assert record(where, "one")["flags"]["memory_budget"] == "4096M"


def test_the_oldest_comes_first_and_may_be_withdrawn(tmp_path: Path) -> None:
    launching, _, where = launcher(tmp_path)
    for name in ("b", "a", "c"):
        launching.ask(name, "train", {})
    launching.withdraw("b")
    assert not (where.log_dir / "b").exists()
    assert [asyncio.run(launching.start_next()) for _ in range(3)] == ["a", "c", None]
    for child in launching._children.values():
        child.wait()


def test_the_queue_is_of_files_and_outlives_the_page(tmp_path: Path) -> None:
    first, _, _ = launcher(tmp_path)
    first.ask("one", "train", {})
    second, _, _ = launcher(tmp_path)
    assert asyncio.run(second.start_next()) == "one"
    assert asyncio.run(first.start_next()) is None, "the other page sees that it was started"
    second._children["one"].wait()


@pytest.mark.parametrize("meanwhile", ["withdrawn", "deleted", "asked anew"])
def test_a_run_that_was_taken_back_while_it_was_planned_is_not_started(tmp_path: Path, meanwhile: str) -> None:
    launching, planner, where = launcher(tmp_path)
    launching.ask("one", "train", {"max_steps": "5"})

    def act() -> None:
        launching.delete("one") if meanwhile == "deleted" else launching.withdraw("one")
        if meanwhile == "asked anew":
            launching.ask("one", "train", {"max_steps": "6"})

    planner.meanwhile = act
    assert asyncio.run(launching.start_next()) is None and not launching._children
    if meanwhile == "asked anew":
        assert record(where, "one")["flags"]["max_steps"] == "6" and run_facts(where, "one")["state"] == "waiting"
    else:
        assert not (where.log_dir / "one").exists()


def test_of_many_who_ask_for_one_name_one_gets_it(tmp_path: Path) -> None:
    launching, _, where = launcher(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(launching.ask, "one", "train", {"max_steps": str(steps)}) for steps in range(1, 9)]
    problems = [one.exception() for one in asked]
    assert sum(problem is None for problem in problems) == 1
    assert all("exists already" in str(problem) for problem in problems if problem is not None)
    assert record(where, "one")["flags"]["max_steps"] == str(problems.index(None) + 1)


def test_a_name_that_another_page_takes_at_that_moment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _, where), (second, _, _) = launcher(tmp_path), launcher(tmp_path)
    first.ask("one", "train", {"max_steps": "5"})
    monkeypatch.setattr(Launcher, "_is_there", lambda self, name: False)  # as it was when the second looked
    with pytest.raises(UserError, match="exists already"):
        second.ask("one", "train", {"max_steps": "6"})
    assert record(where, "one")["flags"]["max_steps"] == "5"


def test_names_of_the_same_second_are_counted_up(tmp_path: Path) -> None:
    launching, _, where = launcher(tmp_path)
    (where.output_dir / "run_2").mkdir()
    assert [launching.ask_anew("run", "train", {}) for _ in range(3)] == ["run", "run_3", "run_4"]
    assert {record(where, name)["flags"]["run_name"] for name in ("run", "run_3", "run_4")} == {"run", "run_3", "run_4"}


@pytest.mark.parametrize("name", ["AUTO", " Auto ", "auto", ""])
def test_a_run_that_is_given_no_name_gets_its_kind_and_the_time(tmp_path: Path, name: str) -> None:
    board = Board(places(tmp_path), tmp_path)
    told = [board.start({"run_name": name}) for _ in range(2)]
    assert len({*told}) == 2 and {folder.name for folder in board.places.log_dir.iterdir()} == {*told}
    assert all(re.fullmatch(r"pretrain_[0-9]{8}_[0-9]{6}(_2)?", one) for one in told)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"flags": 5}',
        '{"command": "rm", "flags": {}, "asked": 1}',
        '{"command": "train", "flags": {}, "asked": "x"}',
    ],
)
def test_a_launch_that_somebody_else_has_written_is_passed_over(tmp_path: Path, content: str) -> None:
    launching, _, where = launcher(tmp_path)
    (where.log_dir / "one").mkdir()
    (where.log_dir / "one" / "launch.json").write_text(content)
    assert asyncio.run(launching.start_next()) is None


def test_what_may_be_resumed(tmp_path: Path) -> None:
    launching, _, where = launcher(tmp_path)
    with pytest.raises(UserError, match="no checkpoint"):
        launching.ask("one", "train", {"is_keep_training": "True"})
    (where.output_dir / "one").mkdir()
    beat(where, "one", time=2e10)
    with pytest.raises(UserError, match="exists"):
        launching.ask("one", "train", {"is_keep_training": "True"})
    beat(where, "one", "stopped", started=1.0)
    launching.ask("one", "train", {"is_keep_training": "True"})
    assert run_facts(where, "one")["state"] == "waiting"


def test_wishes_go_to_runs_alone(tmp_path: Path) -> None:
    launching, _, where = launcher(tmp_path)
    for name, word in (("none", "stop"), ("../x", "stop"), ("one", "kill")):
        with pytest.raises(Outside):
            launching.wish(name, word)
    assert not list(where.log_dir.iterdir())


def test_a_wish_to_stop_stays(tmp_path: Path) -> None:
    """It saves as well; a step may be long, and another tab asks to save within it."""
    launching, _, where = launcher(tmp_path)
    beat(where, "one", time=2e10)
    asked = where.log_dir / "one" / "request"
    launching.wish("one", "save")
    assert [path.read_text() for path in asked.parent.glob("*request*")] == ["save\n"]
    launching.wish("one", "stop")
    launching.wish("one", "save")
    assert [path.read_text() for path in asked.parent.glob("*request*")] == ["stop\n"]


def test_what_others_may_still_take() -> None:
    runs = [
        {"state": "running", "planned_peak_bytes": 10, "peak_bytes": 12, "memory_bytes": 5},
        {"state": "starting", "planned_peak_bytes": 10, "peak_bytes": None, "memory_bytes": None},
        {"state": "running", "planned_peak_bytes": 4, "peak_bytes": 4, "memory_bytes": 9},
        {"state": "done", "planned_peak_bytes": 99, "peak_bytes": 99, "memory_bytes": 0},
    ]
    assert still_to_take(runs) == 7 + 10


def test_a_plan_gets_only_flags_that_it_knows() -> None:
    words = plan_words({"max_steps": "5", "port": "1", "train_file": "x", "run_name": "one"})
    assert set(words) == {"--max_steps=5", "--train_file=x", "--run_name=one"}
    assert "--preset=sample" in plan_words({}), "as train without a file"


def test_a_run_that_goes_on_is_planned_with_its_own_settings(tmp_path: Path) -> None:
    launching, _, where = launcher(tmp_path)
    config = load("train", {"train_file": "rows.jsonl", "model_preset": "tiny", "num_layers": "3", "max_steps": "7"})
    (where.output_dir / "one").mkdir()
    (where.output_dir / "one" / "settings.json").write_text(json.dumps(config.as_dict()))
    launching.ask("one", "train", {"is_keep_training": "True", "max_steps": "9"})
    words = plan_words(record(where, "one")["flags"])
    asked = load("plan", dict(word.removeprefix("--").split("=", 1) for word in words))
    planned = resumed_config(asked, find_run_to_resume(asked))
    assert (planned.data.train_file, planned.model.num_layers, planned.train.max_steps) == ("rows.jsonl", 3, 9)
    assert not [word for word in words if word.startswith("--preset")]


PLANNER = """
import json, sys
budget = next((int(w.split('=')[1][:-1]) * 2**20 for w in sys.argv if w.startswith('--memory_budget=')), 8 * 2**30)
if budget < 2 * 2**30:
    sys.exit(print('plan: does not fit the memory budget\\n  --memory_budget, too little', file=sys.stderr) or 3)
print(json.dumps({'plan': {'peak_bytes': 2 * 2**30, 'budget_bytes': budget}, 'machine': {'available_bytes': 8 * 2**30}}))
"""


@pytest.mark.parametrize(("reserved", "fits", "budget"), [(0, True, 8), (3, True, 5), (7, False, 8)])
def test_others_are_planned_beside(tmp_path: Path, reserved: int, fits: bool, budget: int) -> None:
    planner = Planner(tmp_path, (sys.executable, "-c", PLANNER))
    found = asyncio.run(planner.plan({}, reserved * GIB))
    assert found["fits_now"] is fits and found["plan"]["budget_bytes"] == budget * GIB


def test_a_refusal_brings_its_reasons(tmp_path: Path) -> None:
    planner = Planner(tmp_path, (sys.executable, "-c", PLANNER))
    found = asyncio.run(planner.plan({"memory_budget": "1000M"}))
    assert (found["exit_code"], found["problems"]) == (3, ["--memory_budget, too little"])


def test_a_plan_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SECONDS", 0.2)
    told = tmp_path / "pid"
    program = f"import os, sys; open({str(told)!r}, 'w').write(str(os.getpid())); sys.stdin.close(); import threading; threading.Event().wait()"
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(Planner(tmp_path, (sys.executable, "-c", program)).plan({}))
    if told.exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int(told.read_text()), 0)
