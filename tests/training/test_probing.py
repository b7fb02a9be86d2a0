"""The most that a process held, from what the kernel knows of it."""

from __future__ import annotations

import pytest

from common.units import MIB
from memory.processes import has_proc
from training.probing import peak_bytes, restart_peak


@pytest.mark.skipif(not has_proc(), reason="needs /proc")
def test_what_lived_between_two_looks_is_seen() -> None:
    restart_peak()
    before = peak_bytes()
    buffer = bytearray(64 * MIB)
    del buffer
    assert peak_bytes() > before + 60 * MIB
