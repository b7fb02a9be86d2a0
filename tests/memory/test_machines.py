"""This machine without torch; others by name or file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.units import GIB, MIB
from devices.processor import AVX2
from memory.machines import MACHINES_FILE, target_machine
from memory.step_work import effective_batch
from settings.declared import ROOT
from settings.errors import UserError
from settings.fields import read_settings_file
from settings.loading import load


@pytest.mark.parametrize("name", read_settings_file(MACHINES_FILE))
def test_known_machines_are_complete(name: str) -> None:
    machine = target_machine(name)
    assert machine.budget_bytes > GIB and machine.rate("float32") > 0 and machine.rate("bfloat16") > 0
    assert target_machine(name, 512 * MIB).budget_bytes == 512 * MIB
    config = load("plan", {"train_file": "x", "target": name})
    rows = 8 if name in ("laptop_8gb", "mac_8gb") else 32
    assert effective_batch(config.train, machine) == rows, "a card's memory does not count"


def test_a_file_describes_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("available: 3G\nbase: 200M\nrates: {float32: 1.0e+11, bfloat16: 1.0e+10}\n")
    machine = target_machine(str(path))
    assert (machine.budget_bytes, machine.base_bytes, machine.rate("bfloat16")) == (3 * GIB, 200 * MIB, 1e10)
    assert machine.installed_bytes == 3 * GIB, "what is available, where nothing is said of the RAM"
    path.write_text("available: 3G\nram: 64G\nbase: 200M\nrates: {float32: 1.0e+11, bfloat16: 1.0e+10}\n")
    assert target_machine(str(path), GIB).installed_bytes == 64 * GIB
    assert machine.speed_class == AVX2.name and target_machine("gpu_8gb").speed_class == "cuda"
    path.write_text("available: 3G\nbase: 200M\nclass: mps\nrates: {float32: 1.0e+11, bfloat16: 1.0e+10}\n")
    assert target_machine(str(path)).speed_class == "mps", "its times are those of its class"
    path.write_text("available: 3G\n")
    assert not target_machine("gpu_8gb").no_compiler and "NVIDIA" in target_machine("mac_8gb").no_compiler
    with pytest.raises(UserError, match="missing or wrong"):
        target_machine(str(path))


def test_the_plan_command_does_without_torch() -> None:
    code = (
        "import sys, train_low_mem; code = train_low_mem.main(['plan', '--model_preset=t5-base', "
        "'--target=mac_16gb', '--json'])\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"peak_bytes"' in done.stdout
