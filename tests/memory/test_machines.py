"""This machine without torch; others by name or file."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices.processor import AVX2
from memory.machines import MACHINES_FILE, target_machine
from memory.step_work import effective_batch
from settings.declared import TrainConfig
from settings.errors import UserError
from settings.fields import read_settings_file
from support.units import GIB, MIB


def test_known_machines_are_complete() -> None:
    for name in read_settings_file(MACHINES_FILE):
        machine = target_machine(name)
        assert (
            machine.is_another
            and machine.budget_bytes > GIB
            and machine.rate("float32") > 0
            and machine.rate("bfloat16") > 0
        )
        assert target_machine(name, 512 * MIB).budget_bytes == 512 * MIB
        rows = 8 if name in ("laptop_8gb", "mac_8gb") else 32
        assert effective_batch(TrainConfig(), machine) == rows, "a card's memory does not count"
    assert target_machine("gpu_8gb").speed_class == "cuda" and not target_machine("gpu_8gb").no_compiler
    assert "NVIDIA" in target_machine("mac_8gb").no_compiler


def test_a_file_describes_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("available: 3G\nbase: 200M\nrates: {float32: 1.0e+11, bfloat16: 1.0e+10}\n")
    machine = target_machine(str(path))
    assert machine.rate("bfloat16") == 1e10
    assert (machine.budget_bytes, machine.base_bytes, machine.installed_bytes) == (3 * GIB, 200 * MIB, 3 * GIB)
    assert machine.speed_class == AVX2.name
    path.write_text("available: 3G\n")
    with pytest.raises(UserError, match="missing or wrong"):
        target_machine(str(path))
