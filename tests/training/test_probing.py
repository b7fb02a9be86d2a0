"""The most that a process held, from what the kernel knows of it; and a device that runs out of memory in a probe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.child_process import OUT_OF_MEMORY
from common.units import MIB
from memory.processes import has_proc
from tests import warm
from tests.memory.fake_machine import ME, FakeMachine
from training.probing import peak_bytes, restart_peak


def test_the_peak_is_without_files_and_no_less_than_what_is_held_now(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.process(ME, parent=50, anon=3 * MIB, shared=MIB, file=4 * MIB, highest=9 * MIB)
    assert peak_bytes(tmp_path) == 5 * MIB
    machine.process(ME, parent=50, anon=3 * MIB, shared=MIB, file=4 * MIB, highest=7 * MIB)
    assert peak_bytes(tmp_path) == 4 * MIB, "shared memory is anonymous"


def test_it_begins_anew_where_the_system_can(tmp_path: Path) -> None:
    restart_peak(tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    restart_peak(tmp_path)
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"


@pytest.mark.skipif(sys.platform == "win32", reason="has no resource")
@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_without_proc_it_is_that_of_the_whole_life(
    platform: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5_000_000))
    assert peak_bytes(tmp_path) == 5_000_000 * unit


@pytest.mark.skipif(not has_proc(), reason="needs /proc")
def test_what_lived_between_two_looks_is_seen() -> None:
    restart_peak()
    before = peak_bytes()
    buffer = bytearray(64 * MIB)
    del buffer
    assert peak_bytes() > before + 60 * MIB


SMALL_CARD = """
import devices
from common.child_process import OUT_OF_MEMORY
from tests.fake_device import FakeDevice
from tests.memory.test_probe import request_of
from training import probing
from common.units import GIB, MIB

card = FakeDevice(GIB, name="cpu")
devices.pick = lambda *words: card
try:
    with card.watched():
        probing.measure(request_of(limit_bytes=4 * MIB))
except MemoryError:
    raise SystemExit(OUT_OF_MEMORY)
"""


def test_a_device_that_runs_out_of_memory_says_that_the_plan_does_not_fit() -> None:
    """By the run's own limit of it."""
    child = warm.run(SMALL_CARD, [], os.environ)
    assert child.returncode == OUT_OF_MEMORY, child.stderr
