"""This machine without torch; others by name or file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.units import GIB, MIB
from devices.processor import AVX2
from memory.machines import MACHINES_FILE, target_machine
from memory.step_work import effective_batch
from settings.declared import ROOT, TrainConfig
from settings.errors import UserError
from settings.fields import read_settings_file


def test_known_machines_are_complete() -> None:
    for name in read_settings_file(MACHINES_FILE):
        machine = target_machine(name)
        assert machine.budget_bytes > GIB and machine.rate("float32") > 0 and machine.rate("bfloat16") > 0
        assert target_machine(name, 512 * MIB).budget_bytes == 512 * MIB
        rows = 8 if name in ("laptop_8gb", "mac_8gb") else 32
        assert effective_batch(TrainConfig(), machine) == rows, "a card's memory does not count"
    assert target_machine("gpu_8gb").speed_class == "cuda" and not target_machine("gpu_8gb").no_compiler
    assert "NVIDIA" in target_machine("mac_8gb").no_compiler


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("", {"budget_bytes": 3 * GIB, "base_bytes": 200 * MIB, "installed_bytes": 3 * GIB, "speed_class": AVX2.name}),
        ("ram: 64G", {"installed_bytes": 64 * GIB}),
        ("class: mps", {"speed_class": "mps"}),
    ],
)
def test_a_file_describes_a_machine(tmp_path: Path, line: str, facts: dict[str, Any]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"available: 3G\n{line}\nbase: 200M\nrates: {{float32: 1.0e+11, bfloat16: 1.0e+10}}\n")
    machine = target_machine(str(path))
    assert machine.rate("bfloat16") == 1e10
    assert {name: getattr(machine, name) for name in facts} == facts
    path.write_text("available: 3G\n")
    with pytest.raises(UserError, match="missing or wrong"):
        target_machine(str(path))


def test_the_plan_command_does_without_torch() -> None:
    code = (
        "import sys, train_low_mem; code = train_low_mem.main(['plan', '--model_preset=tiny', "
        "'--target=mac_16gb', '--json'])\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"peak_bytes"' in done.stdout
