"""The most that a process held, from what the kernel says of it; and from its word for the whole life elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from memory.observe import high_water
from memory.observe.high_water import Marks, peak_bytes, read_marks, restart
from memory.observe.processes import has_proc

STATUS = "Name:\tpython\nVmHWM:\t    9000 kB\nRssAnon:\t    3000 kB\nRssFile:\t    4000 kB\nRssShmem:\t     500 kB\nThreads:\t2\n"


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "status").write_text(STATUS)
    monkeypatch.setattr(high_water, "PROCESS", tmp_path)
    monkeypatch.setattr(high_water, "has_proc", lambda: True)
    return tmp_path


def test_shared_memory_is_anonymous_and_all_is_in_bytes(process: Path) -> None:
    assert read_marks() == Marks(9000 * 1024, 3500 * 1024, 4000 * 1024)


def test_the_peak_is_without_files_and_no_less_than_what_is_held_now(process: Path) -> None:
    assert peak_bytes() == 5000 * 1024
    (process / "status").write_text(STATUS.replace("9000", "7100"))
    assert peak_bytes() == 3500 * 1024


def test_it_begins_anew_where_the_system_can(process: Path) -> None:
    restart()
    assert (process / "clear_refs").read_text() == "5"
    (process / "clear_refs").unlink()
    (process / "clear_refs").mkdir()
    restart()


@pytest.mark.skipif(sys.platform == "win32", reason="has no resource")
@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_without_proc_it_is_that_of_the_whole_life(platform: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(high_water, "has_proc", lambda: False)
    monkeypatch.setattr(high_water.sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5_000_000))
    monkeypatch.setattr(high_water, "process_usage", lambda pid: SimpleNamespace(file_bytes=1_000_000))
    assert peak_bytes() == 5_000_000 * unit - 1_000_000
    monkeypatch.setattr(high_water, "process_usage", lambda pid: None)
    assert peak_bytes() == 5_000_000 * unit


@pytest.mark.skipif(not has_proc(), reason="needs /proc")
def test_what_lived_between_two_looks_is_seen() -> None:
    restart()
    before = peak_bytes()
    held = bytearray(64 << 20)
    del held
    assert peak_bytes() > before + (60 << 20)
