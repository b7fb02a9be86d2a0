"""What a run will write is known before it begins, and a disk without room is told then."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from memory.estimate.disk import disk_need, too_full
from memory.estimate.workload import FILE, Machine
from memory.plan import plan
from settings.declared import Config
from settings.loading import load
from support.units import format_size


def config_of(**flags: object) -> Config:
    return load("train", {"model_preset": "t5-small", **{name: str(value) for name, value in flags.items()}})


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk with so many bytes `free`."""
    disk = SimpleNamespace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
    return disk


@pytest.mark.parametrize(
    ("flags", "checkpoints"),
    [({}, 4), ({"keep_latest_n_ckp": 5}, 7), ({"max_steps": 10, "save_steps": 100, "eval_steps": 100}, 1)],
)
def test_as_many_checkpoints_as_can_lie_together(flags: dict[str, object], checkpoints: int) -> None:
    need = disk_need(config_of(**flags), "float32")
    assert need.checkpoints == checkpoints and f"{checkpoints} checkpoint" in need.describe()
    assert need.as_dict()["total_bytes"] == checkpoints * need.checkpoint_bytes + need.log_bytes
    is_sum_told = f"{format_size(checkpoints * need.checkpoint_bytes)} together" in need.describe()
    assert is_sum_told == (checkpoints > 1)


def test_a_disk_without_room_for_one_is_refused_and_for_all_is_told(disk: SimpleNamespace, tmp_path: Path) -> None:
    need = disk_need(config_of(), "float32")
    disk.free = need.checkpoint_bytes - 1
    (problem,), notes = too_full(need, tmp_path)
    assert notes == [] and f"--output_dir = {tmp_path}, has " in problem and "one checkpoint takes" in problem
    disk.free = need.total_bytes - 1
    problems, (note,) = too_full(need, tmp_path)
    assert problems == [] and "4 checkpoints of" in note and "--keep_latest_n_ckp" in note
    assert too_full(need, tmp_path, held_bytes=1) == ([], []), "what the run has already will make room"
    disk.free += 1
    assert too_full(need, tmp_path) == ([], [])


def test_weights_in_a_file_take_room_and_wear_the_disk(disk: SimpleNamespace, tmp_path: Path) -> None:
    config = config_of(effective_batch_size=1, weights_in=FILE)
    choice = plan(config, Machine(2**40, 2**40), source_tokens=512, target_tokens=114).choice
    need = disk_need(config, choice.storage, choice, step_seconds=10.0)
    whole = {"bfloat16": 2, "float32": 4}[choice.storage] * 12 * (4 * 512 * 512 + 2 * 512 * 2048 + 2 * 512 * 512)
    assert need.file_bytes == whole, "the matrices of six encoder and six decoder blocks"
    assert need.daily_bytes == whole * 8640 and "written per day" in need.describe()
    disk.free = need.least_bytes - 1
    (problem,), _ = too_full(need, tmp_path)
    assert "of weights" in problem
    apart = disk_need(config_of(weights_dir=tmp_path / "fast"), choice.storage, choice)
    disk.free = apart.file_bytes - 1
    problems, _ = too_full(apart, tmp_path)
    assert any("--weights_dir" in problem for problem in problems) and apart.least_bytes == apart.checkpoint_bytes
