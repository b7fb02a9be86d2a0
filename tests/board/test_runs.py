"""How a run stands, by its files alone; and the command that lists and deletes."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from board import commands
from board.reader import Folders, History, Outside
from board.runs import delete_run, list_runs, run_facts
from settings.errors import UserError
from settings.loading import load
from tests.board.recorded import BEGAN, beat, folders, start, step, write

GONE = 2**22 + 12345  # above the largest process number
ODD = ["x", [1], {"a": 1}, -1, True, 10**400, None]


@pytest.fixture
def where(tmp_path: Path) -> Folders:
    return folders(tmp_path)


def state(where: Folders, name: str = "one", now: float = BEGAN + 10) -> str:
    return str(run_facts(where, name, now)["state"])


def launch(where: Folders, name: str = "one", **more: Any) -> None:
    (where.log_dir / name).mkdir(exist_ok=True)
    record = {"asked": BEGAN + 1, "command": "train", "flags": {}, "process": None, "host": platform.node(), **more}
    (where.log_dir / name / "launch.json").write_text(json.dumps(record))


def save(where: Folders, file: str, content: dict[str, Any]) -> None:
    """Write a file of the run's model folder."""
    path = where.output_dir / "one" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("facts", "later", "expected"),
    [
        ({}, 29, "running"),
        ({"process": GONE}, 31, "died"),
        ({}, 31, "paused"),  # Its process is halted.
        ({"time": BEGAN - 1000, "started": BEGAN - 2000}, 10, "died"),  # Another process has its number by now.
        ({"time": BEGAN + 3600, "process": GONE}, 0, "died"),  # A clock was ahead.
        ({"state": "failed", "reason": "why"}, 9999, "failed"),
    ],
)
def test_the_last_sign_of_life_decides(where: Folders, facts: dict[str, Any], later: int, expected: str) -> None:
    beat(where, "one", **facts)
    run = run_facts(where, "one", BEGAN + later)
    assert (run["state"], run["reason"]) == (expected, facts.get("reason", ""))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([step(5)], ("stopped", "")),
        ([step(5), {"event": "end", "step": 5}], ("done", "")),
        ([{"event": "failed", "step": 0, "reason": "why"}], ("failed", "why")),
    ],
)
def test_without_a_sign_of_life_its_events_decide(
    where: Folders, events: list[dict[str, Any]], expected: tuple[str, str]
) -> None:
    write(where, "one", start(), *events)
    run = run_facts(where, "one", BEGAN + 10)
    assert (run["state"], run["reason"]) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"why": "other"}, "waiting"),
        ({"refused": "too large"}, "failed"),
        ({"process": os.getpid()}, "starting"),
        ({"process": os.getpid(), "begun": BEGAN - 1000}, "failed"),  # Another process has its number by now.
        ({"process": GONE, "exit_code": 2}, "failed"),
        ({"process": GONE, "exit_code": 0}, "done"),
    ],
)
def test_before_its_first_sign_the_launch_decides(where: Folders, facts: dict[str, Any], expected: str) -> None:
    beat(where, "one", "stopped")  # It is of an earlier part.
    launch(where, **facts)
    (where.log_dir / "one" / "console.log").write_text("train: 1 problem\n  --x, is wrong\n")
    run = run_facts(where, "one")
    assert run["state"] == expected
    if "exit_code" in facts or "begun" in facts:
        assert ("--x, is wrong" in run["reason"]) == (expected != "done")
    beat(where, "one", started=BEGAN + 2, time=BEGAN + 2)
    assert state(where) == "running"


def test_figures_come_from_the_end_of_a_long_file(where: Folders) -> None:
    write(where, "one", start(5000), *(step(n, 1 / n) for n in range(1, 1001)), step(1001, None))
    beat(where, "one", time=BEGAN + 1000, max_steps=5000, seconds_left=60.0)
    facts = run_facts(where, "one", BEGAN + 1001)
    assert (facts["step"], facts["max_steps"], facts["loss"]) == (1001, 5000, 1 / 1000) and not facts["loss_is_number"]
    assert facts["model"] == "tiny" and facts["peak_bytes"] == 1500 and facts["budget_bytes"] == 4000
    assert (facts["seconds_left"], facts["ends"], facts["tokens_per_second"]) == (60.0, BEGAN + 1060, 100.0)


def test_list_and_page_show_the_newest_plan_of_a_start(where: Folders) -> None:
    first, second, newest = ({"event": "plan", "peak_bytes": size, "budget_bytes": 4000} for size in (9, 8, 7))
    history = History(write(where, "one", start(), first, start(), second, step(1), newest))
    history.refresh()
    assert history.latest["plan"]["peak_bytes"] == 7 and run_facts(where, "one")["planned_peak_bytes"] == 7
    beat(where, "one", planned_peak_bytes=6)
    assert run_facts(where, "one")["planned_peak_bytes"] == 6, "of a long file only both ends are read"


BEAT = {"state": "running", "time": 5.0, "max_steps": 10, "started": 1.0, "seconds_left": 5, "doing": {}}
LAUNCH = {"command": "train", "flags": {}, "asked": 3.0, "process": 9, "planned_peak_bytes": 7}
END = {"event": "end", "time": 1.0, "step": 3, "measured_peak_bytes": 5, "best_eval_loss": 1.0}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("heartbeat.json", BEAT),
        ("launch.json", LAUNCH),
        ("metrics.jsonl", step(1)),
        ("metrics.jsonl", {"event": "start", "time": 1.0, "settings": {"max_steps": 5}}),
        ("metrics.jsonl", END),
    ],
)
def test_a_run_with_odd_values_hides_no_other(where: Folders, file: str, content: dict[str, Any]) -> None:
    write(where, "good", step(1, 2.5))
    (where.log_dir / "bad").mkdir()
    for name in content:
        for value in ODD:
            (where.log_dir / "bad" / file).write_text(json.dumps({**content, name: value}) + "\n")
            runs = {run["name"]: run for run in list_runs(where, now=10.0)}
            json.dumps(runs, allow_nan=False)
            assert "bad" in runs and runs["good"]["loss"] == 2.5


def test_those_that_live_come_first(where: Folders) -> None:
    for name, last_state, began in (("a", "done", 9), ("b", "running", 1), ("c", "done", 5)):
        beat(where, name, last_state, started=BEGAN + began)
    assert [run["name"] for run in list_runs(where, BEGAN + 1)] == ["b", "a", "c"]


def test_a_deleted_run_is_gone_and_one_that_lives_stays(where: Folders) -> None:
    owner = {"process": os.getpid(), "host": platform.node(), "started": BEGAN}
    write(where, "one", step(1))
    beat(where, "one", time=2e10)
    save(where, "owner.json", owner)
    assert "stop it first" in delete_run(where, "one") and (where.output_dir / "one").is_dir()
    beat(where, "one", "done")
    assert f"process {os.getpid()} trains one" in delete_run(where, "one"), "its logs may lie elsewhere"
    save(where, "owner.json", {**owner, "started": BEGAN - 2000})  # Another process has its number by now.
    assert delete_run(where, "one") == ""
    assert not (where.output_dir / "one").exists() and not (where.log_dir / "one").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="names are any bytes")
@pytest.mark.parametrize("name", ["m\udcfe", "训" * 70])
def test_a_run_of_any_name_can_be_deleted(where: Folders, name: str) -> None:
    beat(where, name, "done")
    (where.output_dir / name).mkdir()
    assert delete_run(where, name) == ""
    assert not any(where.log_dir.iterdir()) and not any(where.output_dir.iterdir())


@pytest.mark.parametrize("name", ["", "..", "one/../one", "/one"])
def test_nothing_but_a_run_is_deleted(where: Folders, name: str) -> None:
    write(where, "one", step(1))
    with pytest.raises(Outside):
        delete_run(where, name)
    with pytest.raises(UserError):
        commands.runs(config_of(where, delete=name or "two", yes="True"))
    assert (where.log_dir / "one").exists()


def test_a_link_is_deleted_and_not_what_it_points_to(where: Folders) -> None:
    (where.output_dir / "real").mkdir()
    (where.output_dir / "one").symlink_to(where.output_dir / "real")
    assert delete_run(where, "one") == ""
    assert (where.output_dir / "real").exists() and not (where.output_dir / "one").exists()


def config_of(where: Folders, **flags: object) -> Any:
    return load("runs", {"log_dir": str(where.log_dir), "output_dir": str(where.output_dir), **flags})


def test_the_command_lists_runs(
    where: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: BEGAN + 40)
    monkeypatch.setenv("COLUMNS", "200")
    commands.runs(config_of(where))
    assert "no runs" in capsys.readouterr().out
    write(where, "训练", start(), step(40, 1.25), {"event": "eval", "step": 40, "loss": 1.5})
    beat(where, "训练", time=BEGAN + 40, seconds_left=60.0)
    write(where, "old", start(), step(7, 3.0))
    beat(where, "old", "done")
    commands.runs(config_of(where))
    head, running, old = capsys.readouterr().out.splitlines()
    assert running.split()[:6] == ["训练", "running", "40", "/", "100", "1.250"] and "1.500" in running
    ends = time.strftime("%H:%M", time.localtime(BEGAN + 100))
    assert "ends about" in head and running.endswith(ends) and len(old) <= head.index("ends about")
    commands.runs(config_of(where, json="True"))
    assert json.loads(capsys.readouterr().out)[0]["name"] == "训练"
    (where.data_dir / "file").write_text("")
    with pytest.raises(UserError, match="--log_dir"):
        commands.runs(config_of(where, log_dir=str(where.data_dir / "file")))


def test_the_command_deletes_only_after_a_question(where: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(where, "one", "done")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(UserError, match="--yes=True"):
        commands.runs(config_of(where, delete="one"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for answer in ("n", "y"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        commands.runs(config_of(where, delete="one"))
        assert (where.log_dir / "one").exists() == (answer == "n")
