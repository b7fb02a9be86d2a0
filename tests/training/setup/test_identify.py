"""What is settled before torch."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from memory.budget import Budget
from memory.estimate.workload import BASE_BYTES
from memory.system_limits import Limit
from settings.errors import DoesNotFit, UserError
from settings.loading import load
from support.units import MIB
from training.setup.identify import check_torch_can_load
from training.setup.stages import prepare_run


def test_where_the_system_would_kill_while_torch_is_loaded_it_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = (Limit("memory limit of the group", BASE_BYTES // 2),)
    killing = Budget(BASE_BYTES // 2, None, BASE_BYTES // 2, limits, limits[0].what, margin_bytes=5 * MIB)
    monkeypatch.setattr("training.setup.identify.host_budget", lambda *asked: killing)
    config = load("train", {"train_file": "missing.txt", "output_dir": str(tmp_path)})
    with pytest.raises(DoesNotFit, match="is too small for the program itself"):
        check_torch_can_load(config.run, config.memory.memory_budget)
    assert not any(tmp_path.iterdir())


def test_a_name_that_is_too_long_leaves_nothing(tmp_path: Path) -> None:
    """Also where a file system could hold a folder of that name, but not the names that are made of it."""
    runs, logs = tmp_path / "runs", tmp_path / "logs"
    runs.mkdir()
    flags = {"train_file": "missing.txt", "run_name": "x" * 121, "is_keep_training": "auto"}
    config = load("train", {**flags, "output_dir": str(runs), "log_dir": str(logs)})
    with ExitStack() as resources, pytest.raises(UserError, match=r"--run_name = x.*121 characters.*allowed: 120"):
        check_torch_can_load(config.run, config.memory.memory_budget)
        prepare_run(config, resources)
    assert not any(runs.iterdir()) and not logs.exists()
