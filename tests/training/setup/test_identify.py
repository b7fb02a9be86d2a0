"""What is settled before torch: that it needs none, and for whom it is settled."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from common.units import MIB
from memory.budget import FLAG, Budget
from memory.estimate.workload import BASE_BYTES
from memory.system_limits import Limit
from settings.errors import DoesNotFit, UserError
from settings.loading import load
from training.setup.identify import check_torch_can_load
from training.setup.stages import prepare_run

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_TORCH = (
    "training.setup.stages",
    "training.checkpoints.runs",
    "training.checkpoints.run_lock",
    "training.report.trackers",
    "memory.monitor",
    "model.formats.shape_file",
    "model.formats.adapter_folder",
    "model.lora.form",
    "model.lora.freezing",
    "commands.plan",
)


def test_what_comes_before_torch_imports_none() -> None:
    code = f"import sys, {', '.join(WITHOUT_TORCH)}; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_where_the_system_would_kill_while_torch_is_loaded_it_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user's own figure is as small nothing kills, and the plan tells what would fit."""
    limits = (Limit("memory limit of the group", BASE_BYTES // 2),)
    killing = Budget(BASE_BYTES // 2, None, BASE_BYTES // 2, limits, limits[0].what, margin_bytes=5 * MIB)
    monkeypatch.setattr("training.setup.identify.host_budget", lambda *asked: killing)
    config = load("train", {"train_file": "missing.txt", "output_dir": str(tmp_path)})
    with pytest.raises(DoesNotFit, match="does not hold the program itself"):
        check_torch_can_load(config.run, config.memory.memory_budget)
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr("training.setup.identify._address_limit", lambda: 800 * MIB)
    with pytest.raises(DoesNotFit, match=r"ulimit -v, 800\.0 MiB, does not hold the addresses"):
        check_torch_can_load(config.run, config.memory.memory_budget)
    monkeypatch.setattr("training.setup.identify._address_limit", lambda: None)
    named_budget = replace(killing, binding=FLAG, margin_bytes=0)
    monkeypatch.setattr("training.setup.identify.host_budget", lambda *asked: named_budget)
    with ExitStack() as resources, pytest.raises(UserError, match="no such file"):
        check_torch_can_load(config.run, config.memory.memory_budget)
        prepare_run(config, resources)


@pytest.mark.parametrize("length", [121, 300])
@pytest.mark.parametrize("goes_on", ["auto", "True"])
def test_a_name_that_is_too_long_leaves_nothing(tmp_path: Path, length: int, goes_on: str) -> None:
    """Also where a file system could hold a folder of that name, but not the names that are made of it."""
    runs, logs = tmp_path / "runs", tmp_path / "logs"
    runs.mkdir()
    flags = {"train_file": "missing.txt", "run_name": "x" * length, "is_keep_training": goes_on}
    config = load("train", {**flags, "output_dir": str(runs), "log_dir": str(logs)})
    problem = "has no run to resume" if goes_on == "True" else f"--run_name = x.*{length} characters.*allowed: 120"
    with ExitStack() as resources, pytest.raises(UserError, match=problem):
        check_torch_can_load(config.run, config.memory.memory_budget)
        prepare_run(config, resources)
    assert not any(runs.iterdir()) and not logs.exists()
