"""The most that a process held, from what the kernel knows of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.units import MIB
from memory.processes import has_proc
from tests.memory.fake_machine import ME, FakeMachine
from training.probing import peak_bytes, restart_peak


def test_the_peak_is_without_files_and_no_less_than_what_is_held_now(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.process(ME, parent=50, anon=3 * MIB, shared=MIB, file=4 * MIB, highest=9 * MIB)
    assert peak_bytes(tmp_path) == 5 * MIB
    machine.process(ME, parent=50, anon=3 * MIB, shared=MIB, file=4 * MIB, highest=7 * MIB)
    assert peak_bytes(tmp_path) == 4 * MIB, "shared memory is anonymous"


@pytest.mark.skipif(not has_proc(), reason="needs /proc")
def test_what_lived_between_two_looks_is_seen() -> None:
    restart_peak()
    before = peak_bytes()
    buffer = bytearray(64 * MIB)
    del buffer
    assert peak_bytes() > before + 60 * MIB
