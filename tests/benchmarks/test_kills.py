"""The faults do what they say, and the kills count what they find."""

from __future__ import annotations

import errno
import functools
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults import kills
from benchmarks.faults.disk_faults import Fault, start, state_of
from benchmarks.faults.kill_cases import Case, Verdict, World
from benchmarks.faults.killed_commands import cases_of
from benchmarks.faults.kills import Series, body
from config import load
from tests.killing import run_child

pytestmark = pytest.mark.skipif(os.name == "nt", reason="os.fork")


def write(path: Path, content: str, is_synced: bool) -> None:
    handle = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.write(handle, content.encode())
    if is_synced:
        os.fsync(handle)
    os.close(handle)


def test_a_trace_tells_each_change_and_the_disk_around_it(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()

    def work() -> None:
        start(Fault("trace", log=str(tmp_path / "log"), below=str(tmp_path / "disk")))
        os.mkdir(tmp_path / "disk" / "a")
        write(tmp_path / "disk" / "b", "x", is_synced=True)

    assert run_child(work) == 0
    made, synced = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert made["change"].startswith(f"mkdir {tmp_path / 'disk' / 'a'}") and synced["change"].startswith("fsync")
    assert made["states"][0] != made["states"][1] != synced["states"][0] == synced["states"][1]
    assert synced["states"][1] == state_of(str(tmp_path / "disk"))


def test_every_command_that_is_killed_takes_its_flags(tmp_path: Path) -> None:
    for case in cases_of(World(tmp_path)):
        command, *flags = case.words(tmp_path)
        load(command, dict(flag.removeprefix("--").split("=", 1) for flag in flags))


@pytest.mark.parametrize("is_after", [False, True])
def test_a_kill_comes_before_or_behind_its_change(tmp_path: Path, is_after: bool) -> None:
    def work() -> None:
        start(Fault("kill", 1, is_after))
        for name in "abc":
            os.mkdir(tmp_path / name)

    assert run_child(work) == -9
    assert sorted(os.listdir(tmp_path)) == (["a", "b"] if is_after else ["a"])


def test_a_failing_disk_fails_from_then_on(tmp_path: Path) -> None:
    def work() -> None:
        start(Fault("error", 1, error=errno.EROFS))
        os.mkdir(tmp_path / "a")
        for _ in range(2):
            with pytest.raises(OSError, match="Read-only"):
                os.mkdir(tmp_path / "b")

    assert run_child(work) == 0


def test_a_moment_inside_a_function(tmp_path: Path) -> None:
    def work() -> None:
        start(Fault("kill", function="json:dumps", call=1))
        json.dumps(1)
        (tmp_path / "first").touch()
        json.dumps(list(range(10_000_000)))
        (tmp_path / "second").touch()

    assert run_child(work) < 0
    assert os.listdir(tmp_path) == ["first"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs the names of open files")
@pytest.mark.parametrize("undoes", [False, True])
def test_power_takes_what_was_not_waited_for(tmp_path: Path, undoes: bool) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    write(disk / "old", "old", is_synced=False)

    def work() -> None:
        start(Fault("power", 4, below=str(disk), undoes=undoes, log=str(tmp_path / "aside")))
        write(disk / "waited", "x", is_synced=True)  # 0
        write(disk / "not", "x", is_synced=False)
        os.replace(disk / "waited", disk / "old")  # 1
        os.mkdir(disk / "made")  # 2
        write(disk / "made" / "inner", "x", is_synced=True)  # 3
        os.rename(disk / "not", disk / "renamed")  # 4

    assert run_child(work) == -9
    left = {path.name: path.read_text() for path in disk.rglob("*") if path.is_file()}
    assert left == ({"waited": "x", "old": "old", "not": ""} if undoes else {"old": "x", "inner": "x", "renamed": ""})


def test_figures_tell_every_problem() -> None:
    one, other = Series("one", is_done=True), Series("other")
    one.add("before a", Verdict(repeated=2))
    one.add("before c", None)
    other.add("after b", Verdict(["torn"], 3))
    text = body([one, other, Series("third")])
    assert "2 kills" in text and "| one | 1 | 2 | 0 |" in text and "- other, after b: torn" in text
    assert "| other (not at its end) | 1 | 3 | 1 |" in text and "Not yet run: third." in text


def test_every_part_that_is_killed_inside_is_there(tmp_path: Path) -> None:
    """Names of functions in texts are what a renaming forgets."""
    world = World(tmp_path)
    places = [place for case in cases_of(world) for place in case.timed]
    assert len(places) > 10
    for place in places:
        module, _, name = place.partition(":")
        assert callable(functools.reduce(getattr, name.split("."), importlib.import_module(module))), place


def test_a_series_goes_on_behind_its_last_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "NOTES", tmp_path)
    done: list[str] = []

    def moment(name: str, verdict: Verdict | None) -> tuple[str, Callable[[], Verdict | None]]:
        def kill() -> Verdict | None:
            done.append(name)
            return verdict

        return name, kill

    def broken() -> Verdict:
        raise KeyboardInterrupt

    first = [moment("a", Verdict(repeated=1)), moment("b", None)]
    with pytest.raises(KeyboardInterrupt):
        Series.noted("train, at random").run([*first, ("c", broken)])
    Series.noted("train, at random").run([*first, moment("c", Verdict(["torn"]))])
    Series.noted("train, at random").run([*first, ("d", broken)])
    found = Series.noted("train, at random")
    assert done == ["a", "b", "c"]
    assert (found.kills, found.passed_by, found.problems, found.is_done) == (2, 1, ["c: torn"], True)


def test_a_disk_is_judged_once_and_a_mirror_is_part_of_it(tmp_path: Path) -> None:
    judged: list[str] = []

    class Looked(Case):
        def judge(self, folder: Path) -> Verdict:
            judged.append(folder.name)
            return Verdict()

    world = World(tmp_path)
    case = Looked("case", world, lambda folder: (), {})
    for name, place in (("a", "runs/x"), ("b", "runs/x"), ("c", "there/x"), ("d", "there/y"), ("e", "logs/y")):
        (tmp_path / name / place).parent.mkdir(parents=True)
        (tmp_path / name / place).write_text("x")
        case.verdict(tmp_path / name)
    assert judged == ["a", "c", "d", "e"]
