"""What is settled before torch: that it needs none, and for whom it is settled."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from config import load
from training.ahead import begin_ahead
from training.processes.launch import SIZES

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = (
    "training.ahead", "training.start.beginning", "training.start.base", "training.start.adapted", "training.start.resuming",
    "training.checkpoints.runs", "training.checkpoints.ownership", "training.report.trackers", "memory.observe.monitor",
    "model.formats.shape_file", "model.formats.adapter_folder", "model.lora.form", "model.lora.freezing", "commands.plan",
)  # fmt: skip


def test_what_comes_before_torch_imports_none() -> None:
    code = f"import sys, {', '.join(WITHOUT_TORCH)}; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("size", SIZES)
def test_several_processes_begin_together(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv(size, "2")
    with ExitStack() as held:
        assert begin_ahead(load("train", {"train_file": "missing.txt"}), held) is None
