"""What is settled before torch: that it needs none, and for whom it is settled."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from config import load
from memory.cost.work import BASE_BYTES
from memory.observe.budget import FLAG, Budget, Limit
from settings.errors import DoesNotFit, UserError
from trainer_low_mem import LowMemTrainer
from training.ahead import begin_ahead
from training.checkpoints.ownership import Ownership
from training.checkpoints.runs import newest_run, read_run, resume_run
from training.processes.launch import SIZES
from training.start.resuming import find_run_to_resume
from units import MIB

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


def test_where_the_system_would_kill_while_torch_is_loaded_it_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user's own figure is as small nothing kills, and the plan tells what would fit."""
    limits = (Limit("memory limit of the group", BASE_BYTES // 2),)
    killing = Budget(BASE_BYTES // 2, None, BASE_BYTES // 2, limits, limits[0].what, margin_bytes=5 * MIB)
    monkeypatch.setattr("training.ahead.host_budget", lambda flag: killing)
    config = load("train", {"train_file": "missing.txt", "output_dir": str(tmp_path)})
    with ExitStack() as held, pytest.raises(DoesNotFit, match="does not hold the program itself"):
        begin_ahead(config, held)
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr("training.ahead._address_limit", lambda: 800 * MIB)
    with ExitStack() as held, pytest.raises(DoesNotFit, match=r"ulimit -v, 800\.0 MiB, does not hold the addresses"):
        begin_ahead(config, held)
    monkeypatch.setattr("training.ahead._address_limit", lambda: None)
    named = replace(killing, binding=FLAG, margin_bytes=0)
    monkeypatch.setattr("training.ahead.host_budget", lambda flag: named)
    with ExitStack() as held, pytest.raises(UserError, match="no such file"):
        begin_ahead(config, held)


@pytest.mark.parametrize("length", [121, 240, 300])
@pytest.mark.parametrize("goes_on", ["False", "auto", "True"])
def test_a_name_that_is_too_long_leaves_nothing(tmp_path: Path, length: int, goes_on: str) -> None:
    """Also where a file system could hold a folder of that name, but not the names that are made of it."""
    runs, logs = tmp_path / "runs", tmp_path / "logs"
    runs.mkdir()
    flags = {"train_file": "missing.txt", "run_name": "x" * length, "is_keep_training": goes_on}
    config = load("train", {**flags, "output_dir": str(runs), "log_dir": str(logs)})
    told = "has no run to resume" if goes_on == "True" else f"a name of {length} letters.*allowed: 120 letters"
    with ExitStack() as held, pytest.raises(UserError, match=told):
        begin_ahead(config, held)
    assert not any(runs.iterdir()) and not logs.exists()


def test_a_run_of_before_whose_name_is_long_goes_on(tmp_path: Path) -> None:
    name = "x" * 190
    config = load("train", {"run_name": name, "is_keep_training": "True", "output_dir": str(tmp_path)})
    (tmp_path / name).mkdir()
    (tmp_path / name / "settings.json").write_text(json.dumps(config.as_dict()))
    (tmp_path / name / "run.json").write_text(json.dumps({"name": name, "kind": "pretrain", "started": 1.0}))
    assert newest_run(tmp_path) == find_run_to_resume(config) == tmp_path / name
    with Ownership() as owner:
        assert owner.take(resume_run(tmp_path / name)) == []
    assert (read_run(tmp_path / name) or {})["name"] == name


def test_a_run_goes_on_on_the_device_and_with_the_trackers_it_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = load("train", {"train_file": "x", "is_keep_training": "True", "run_name": "r"})
    saved = typed.changed(device="cpu", log_with="tensorboard")
    ahead: Any = SimpleNamespace(begun=SimpleNamespace(config=saved))
    asked: list[str] = []

    def stop(**named: object) -> None:
        asked.append(str(named["log_with"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "trainer_low_mem.devices.pick", lambda name, rank: asked.append(name) or SimpleNamespace(name=name)
    )
    monkeypatch.setattr("trainer_low_mem.tracker_names", lambda config: [config.run.log_with])
    monkeypatch.setattr("trainer_low_mem.Accelerator", stop)
    with pytest.raises(KeyboardInterrupt):
        LowMemTrainer(typed, ahead=ahead).train()
    assert asked == ["cpu", "['tensorboard']"]
