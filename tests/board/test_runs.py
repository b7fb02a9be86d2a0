"""How a run stands, told from its files alone; and the command that lists and deletes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from board import commands
from board.places import Places
from board.runs import delete_run, folder_bytes, is_alive, list_runs, run_facts
from config import UserError, load
from tests.board.recorded import BEGAN, beat, places, start, step, write

GONE = 2**22 + 12345  # above the largest process number


def state(where: Places, name: str = "one", now: float = BEGAN + 10) -> str:
    return str(run_facts(where, name, now)["state"])


def launch(where: Places, name: str = "one", **more: Any) -> None:
    (where.log_dir / name).mkdir(exist_ok=True)
    record = {"asked": BEGAN + 1, "command": "train", "flags": {}, "process": None, "host": platform.node(), **more}
    (where.log_dir / name / "launch.json").write_text(json.dumps(record))


def test_a_run_that_gives_signs_of_life_is_running(tmp_path: Path) -> None:
    where = places(tmp_path)
    write(where, "one", start(), step(5))
    beat(where, "one", time=BEGAN)
    assert state(where, now=BEGAN + 29) == "running"


def test_without_a_sign_for_half_a_minute_it_has_died(tmp_path: Path) -> None:
    where = places(tmp_path)
    write(where, "one", start(), step(5))
    beat(where, "one", process=GONE)
    assert state(where, now=BEGAN + 31) == "died"


def test_one_whose_process_is_halted_has_not_died(tmp_path: Path) -> None:
    where = places(tmp_path)
    beat(where, "one", process=os.getpid())
    assert state(where, now=BEGAN + 31) == "paused"


def test_a_process_that_began_later_is_another(tmp_path: Path) -> None:
    """As after a restart of the machine, or of a container, whose numbers begin anew."""
    where = places(tmp_path)
    beat(where, "one", time=BEGAN - 1000, started=BEGAN - 2000, process=os.getpid())
    launch(where, "two", process=os.getpid(), begun=BEGAN - 1000)
    assert state(where) == "died" and state(where, "two") == "failed"
    (where.output_dir / "one").mkdir()
    owner = {"process": os.getpid(), "host": platform.node(), "started": BEGAN - 2000}
    (where.output_dir / "one" / "owner.json").write_text(json.dumps(owner))
    assert delete_run(where, "one") == ""


def test_of_another_machine_only_its_signs_tell(tmp_path: Path) -> None:
    where = places(tmp_path)
    beat(where, "one", host="elsewhere")
    assert state(where, now=BEGAN + 31) == "died"


@pytest.mark.parametrize("ahead", [31, 3600, 2e10])
def test_a_sign_of_a_clock_that_was_ahead_is_no_sign_of_life(tmp_path: Path, ahead: float) -> None:
    where = places(tmp_path)
    beat(where, "one", time=BEGAN + ahead, process=GONE)
    beat(where, "two", time=BEGAN + ahead, process=os.getpid())
    beat(where, "far", time=BEGAN + ahead, host="elsewhere")
    assert [state(where, name, BEGAN) for name in ("one", "two", "far")] == ["died", "paused", "died"]
    beat(where, "one", time=BEGAN + 29, process=GONE)
    assert state(where, now=BEGAN) == "running", "clocks of two machines differ a little"


def test_a_run_that_died_with_its_clock_ahead_can_be_deleted(tmp_path: Path) -> None:
    where = places(tmp_path)
    beat(where, "one", time=2e10, process=GONE)
    assert delete_run(where, "one") == "" and not (where.log_dir / "one").exists()


@pytest.mark.parametrize("ending", ["done", "stopped", "failed"])
def test_its_last_sign_says_how_it_ended(tmp_path: Path, ending: str) -> None:
    where = places(tmp_path)
    beat(where, "one", ending, reason="why")
    facts = run_facts(where, "one", BEGAN + 9999)
    assert (facts["state"], facts["reason"]) == (ending, "why")


def test_runs_of_before_have_no_sign_of_life(tmp_path: Path) -> None:
    where = places(tmp_path)
    path = write(where, "one", start(), step(5), {"event": "end", "step": 5})
    assert state(where) == "done"
    write(where, "one", start(), step(5))
    os.utime(path, (BEGAN, BEGAN))
    assert state(where, now=BEGAN + 10) == "running"
    assert state(where, now=BEGAN + 100) == state(where, now=BEGAN - 100) == "stopped"
    (where.output_dir / "one").mkdir()
    (where.output_dir / "one" / "owner.json").write_text("{}")
    assert state(where, now=BEGAN + 100) == state(where, now=BEGAN - 100) == "died"


def test_one_that_was_asked_for_waits(tmp_path: Path) -> None:
    where = places(tmp_path)
    launch(where, why="other")
    assert run_facts(where, "one")["reason"] == "other" and state(where) == "waiting"


def test_one_that_has_told_nothing_yet_is_what_was_asked_for(tmp_path: Path) -> None:
    where = places(tmp_path)
    launch(where, flags={"train_file": "a.jsonl", "model_preset": "t5-small", "is_finetune": "True", "objective": 5})
    facts = run_facts(where, "one")
    assert (facts["model"], facts["data"], facts["kind"]) == ("t5-small", "a.jsonl", "finetune")
    write(where, "one", start())
    assert run_facts(where, "one")["model"] == "tiny", "its own word counts"


def test_one_that_prepares_is_listed_by_its_sign_of_life_alone(tmp_path: Path) -> None:
    where = places(tmp_path)
    doing = {"what": "preparing train", "rows": 12000, "rows_per_second": 3000.0}
    beat(where, "one", "starting", kind="finetune", model="t5-small", data="a.jsonl", doing=doing)
    (facts,) = list_runs(where, BEGAN + 9999)
    assert (facts["state"], facts["kind"], facts["data"]) == ("paused", "finetune", "a.jsonl")
    (facts,) = list_runs(where, BEGAN + 9)
    assert (facts["state"], facts["process"], facts["doing"], facts["started"]) == (
        "starting",
        os.getpid(),
        doing,
        BEGAN,
    )
    assert "stop it first" in delete_run(where, "one")
    beat(where, "one", "starting", process=GONE)
    assert state(where, now=BEGAN + 31) == "died"


@pytest.mark.parametrize(
    ("kind", "told", "data", "learns"),
    [
        ("pretrain", {"objective": "span"}, "a.txt", "text"),
        ("pretrain", {"objective": "pairs"}, "a.jsonl", "answers"),
        ("pretrain", {}, "a.jsonl", ""),
        ("pretrain", {}, None, "text"),
        ("finetune", {}, "a.jsonl", "answers"),
        ("dpo", {"objective": "preferences"}, "a.jsonl", "preferences"),
    ],
)
def test_what_a_run_learns_follows_from_its_rows(
    tmp_path: Path, kind: str, told: dict[str, str], data: str | None, learns: str
) -> None:
    where = places(tmp_path)
    beat(where, "one", "starting", kind=kind, data=data, objective="auto")
    if told:
        (where.output_dir / "one").mkdir()
        (where.output_dir / "one" / "run.json").write_text(json.dumps({"kind": kind, **told}))
    facts = run_facts(where, "one", BEGAN + 1)
    assert (facts["kind"], facts["learns"]) == (kind, learns)


def test_a_run_hears_wishes_from_its_own_first_sign_on(tmp_path: Path) -> None:
    where = places(tmp_path)
    launch(where, process=os.getpid())
    assert not run_facts(where, "one", BEGAN + 2)["hears"]
    beat(where, "one", "starting", started=BEGAN + 2)
    assert run_facts(where, "one", BEGAN + 3)["hears"]
    assert not run_facts(where, "one", BEGAN + 99)["hears"], "its process is halted"
    beat(where, "one", "stopped", started=BEGAN + 2)
    assert not run_facts(where, "one", BEGAN + 3)["hears"]


def test_one_whose_process_prepares_is_starting(tmp_path: Path) -> None:
    where = places(tmp_path)
    launch(where, process=os.getpid())
    assert state(where) == "starting"


@pytest.mark.parametrize(("code", "expected"), [(2, "failed"), (130, "stopped"), (0, "done"), (None, "failed")])
def test_one_that_ended_before_its_first_sign(tmp_path: Path, code: int | None, expected: str) -> None:
    where = places(tmp_path)
    launch(where, process=GONE, exit_code=code)
    (where.log_dir / "one" / "console.log").write_text("train: 1 problem\n  --x, is wrong\n")
    facts = run_facts(where, "one")
    assert facts["state"] == expected
    assert ("--x, is wrong" in facts["reason"]) == (expected in ("failed", "stopped"))


def test_a_run_that_is_resumed_from_the_page_waits_again(tmp_path: Path) -> None:
    where = places(tmp_path)
    beat(where, "one", "stopped")
    launch(where, asked=BEGAN + 50)
    assert state(where) == "waiting"
    beat(where, "one", "running", started=BEGAN + 60, time=BEGAN + 60)
    assert state(where, now=BEGAN + 61) == "running"


def test_figures_come_from_the_end_of_a_long_file(tmp_path: Path) -> None:
    where = places(tmp_path)
    write(where, "one", start(5000), *(step(n, 1 / n) for n in range(1, 3001)))
    beat(where, "one", time=BEGAN + 3000, max_steps=5000)
    facts = run_facts(where, "one", BEGAN + 3001)
    assert (facts["step"], facts["max_steps"], facts["loss"]) == (3000, 5000, 1 / 3000)
    assert facts["model"] == "tiny" and facts["peak_bytes"] == 1500 and facts["budget_bytes"] == 4000
    assert facts["seconds_left"] == pytest.approx(2000.0)


@pytest.mark.parametrize("jump", [-5000.0, -1e9, 5000.0, 1e9])
def test_a_clock_that_is_set_changes_nothing_about_what_is_left(tmp_path: Path, jump: float) -> None:
    where = places(tmp_path)
    steps = [step(n, time=BEGAN + 2 * n + (jump if n > 15 else 0.0)) for n in range(1, 31)]
    write(where, "one", start(130), *steps)
    beat(where, "one", time=BEGAN + 60, max_steps=130)
    left = run_facts(where, "one", BEGAN + 61)["seconds_left"]
    assert left == pytest.approx(200.0, rel=0.05), "two seconds a step, also where its rows come late"


def test_evaluations_count_in_what_is_left_and_the_night_between_two_starts_does_not(tmp_path: Path) -> None:
    where = places(tmp_path)
    evaluated = [*(step(n) for n in range(4, 15)), {"event": "eval", "step": 14, "loss": 1.0}]
    rest = [step(n, time=BEGAN + n + 1000) for n in range(15, 25)]
    write(where, "one", *evaluated, *rest)
    beat(where, "one", time=BEGAN + 60, max_steps=124)
    assert run_facts(where, "one", BEGAN + 61)["seconds_left"] == pytest.approx(100 * 1020 / 20)
    write(where, "one", *evaluated, start(), *rest)
    assert run_facts(where, "one", BEGAN + 61)["seconds_left"] == pytest.approx(100.0)
    write(where, "one", step(4, time="x", seconds="y"), step(5), step(5))
    assert run_facts(where, "one", BEGAN + 61)["seconds_left"] == pytest.approx(119.0)


def test_a_loss_that_is_no_number_is_told(tmp_path: Path) -> None:
    where = places(tmp_path)
    write(where, "one", start(), step(1, 3.0), step(2, None))
    facts = run_facts(where, "one")
    assert facts["loss"] == 3.0 and not facts["loss_is_number"]


@pytest.mark.parametrize("junk", ["", "[]", "nonsense", '{"time": "x"}', "[" * 5000])
def test_broken_files_break_no_list(tmp_path: Path, junk: str) -> None:
    where = places(tmp_path)
    path = write(where, "one", tail=junk + "\n")
    for name in ("heartbeat.json", "launch.json"):
        path.with_name(name).write_text(junk)
    assert [run["name"] for run in list_runs(where)] == ["one"]


def test_those_that_live_come_first(tmp_path: Path) -> None:
    where = places(tmp_path)
    for name, told, began in (("a", "done", 9), ("b", "running", 1), ("c", "done", 5)):
        beat(where, name, told, time=BEGAN, started=BEGAN + began)
        write(where, name, step(1))
    assert [run["name"] for run in list_runs(where, BEGAN + 1)] == ["b", "a", "c"]


def test_a_process_that_has_ended_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not is_alive(child.pid) and is_alive(os.getpid())


def test_hard_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    os.link(tmp_path / "a", tmp_path / "b")
    assert folder_bytes(tmp_path) == 1000


def test_a_deleted_run_is_gone_and_one_that_lives_stays(tmp_path: Path) -> None:
    where = places(tmp_path)
    write(where, "one", step(1))
    (where.output_dir / "one").mkdir()
    beat(where, "one", time=2e10)
    assert "stop it first" in delete_run(where, "one") and (where.output_dir / "one").is_dir()
    beat(where, "one", "done")
    assert delete_run(where, "one") == ""
    assert not (where.output_dir / "one").exists() and not (where.log_dir / "one").exists()


def test_a_run_whose_logs_lie_elsewhere_is_not_deleted_while_it_is_trained(tmp_path: Path) -> None:
    where = places(tmp_path)
    (where.output_dir / "one").mkdir()
    owner = {"process": os.getpid(), "host": platform.node(), "started": BEGAN}
    (where.output_dir / "one" / "owner.json").write_text(json.dumps(owner))
    assert f"process {os.getpid()} trains one; stop it first" in delete_run(where, "one")
    (where.output_dir / "one" / "owner.json").write_text(json.dumps({**owner, "process": 2**22 + 1}))
    assert delete_run(where, "one") == "" and not (where.output_dir / "one").exists()


def test_a_link_is_deleted_and_not_what_it_points_to(tmp_path: Path) -> None:
    where = places(tmp_path)
    (where.output_dir / "real").mkdir()
    (where.output_dir / "real" / "weights").write_text("x")
    (where.output_dir / "one").symlink_to(where.output_dir / "real")
    assert delete_run(where, "one") == ""
    assert (where.output_dir / "real" / "weights").exists() and not (where.output_dir / "one").exists()


def config_of(where: Places, **flags: object) -> Any:
    return load("runs", {"log_dir": str(where.log_dir), "output_dir": str(where.output_dir), **flags})


def test_the_command_lists_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    where = places(tmp_path)
    commands.runs(config_of(where))
    assert "no runs" in capsys.readouterr().out
    write(where, "训练", start(), step(7, 1.25))
    beat(where, "训练", "done")
    commands.runs(config_of(where))
    head, row = capsys.readouterr().out.splitlines()
    assert row.split()[:5] == ["训练", "done", "7", "/", "100"] and "1.250" in row and "on disk" in head
    commands.runs(config_of(where, json="True"))
    assert json.loads(capsys.readouterr().out)[0]["name"] == "训练"


def test_the_command_says_how_runs_compare_and_when_they_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = places(tmp_path)
    monkeypatch.setattr(time, "time", lambda: BEGAN + 40)
    monkeypatch.setenv("COLUMNS", "200")
    evaluated = {"event": "eval", "step": 40, "loss": 1.5}
    write(where, "one", start(), *(step(number, 1.25) for number in range(1, 41)), evaluated)
    beat(where, "one", time=BEGAN + 40)
    write(where, "old", start(), step(7, 3.0))
    beat(where, "old", "done")
    commands.runs(config_of(where))
    head, running, old = capsys.readouterr().out.splitlines()
    assert running[head.index("evaluation loss") :].startswith("1.500")
    ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(BEGAN + 100))
    assert running[head.index("ends about") :] == ends and len(old) <= head.index("ends about")


def test_a_file_in_the_place_of_the_runs_is_told(tmp_path: Path) -> None:
    where = places(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--log_dir = .*file, is a file"):
        commands.runs(config_of(where, log_dir=str(tmp_path / "file")))


def test_it_deletes_only_after_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = places(tmp_path)
    write(where, "one", step(1))
    beat(where, "one", "done")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(UserError, match="--yes=True"):
        commands.runs(config_of(where, delete="one"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    commands.runs(config_of(where, delete="one"))
    assert (where.log_dir / "one").exists()
    monkeypatch.setattr("builtins.input", lambda question: "y")
    commands.runs(config_of(where, delete="one"))
    assert not (where.log_dir / "one").exists() and "free" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["two", "..", "../logs", "", "one/../one"])
def test_only_runs_are_deleted(tmp_path: Path, name: str) -> None:
    where = places(tmp_path)
    write(where, "one", step(1))
    with pytest.raises(UserError):
        commands.runs(config_of(where, delete=name or "none of them", yes="True"))
    assert (where.log_dir / "one").exists()
