"""What a run will write is known before it begins, and a disk without room is told then."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from config import Config, load
from memory.cost import disk
from memory.cost.disk import BESIDE_BYTES, bytes_below, disk_need, free_bytes, too_full
from units import MIB


def config_of(**flags: object) -> Config:
    return load("train", {"model_preset": "t5-small", **{name: str(value) for name, value in flags.items()}})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free bytes, the first member."""
    room = [0]
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=room[0]))
    return room


def test_weights_and_state_count_as_they_are_stored() -> None:
    weights = 60_506_624
    full = disk_need(config_of(optimizer="adamw"), "float32")
    assert full.checkpoint_bytes == weights * (4 + 8)
    assert disk_need(config_of(optimizer="adamw"), "bfloat16").checkpoint_bytes == weights * (2 + 8)
    small = disk_need(config_of(optimizer="adafactor"), "bfloat16")
    assert 2 * weights < small.checkpoint_bytes < 2.02 * weights
    adapters = disk_need(config_of(lora_rank=8, is_finetune=True, finetune_from="x", optimizer="adamw"), "bfloat16")
    assert adapters.checkpoint_bytes < full.checkpoint_bytes / 100, "adapters alone are written"


@pytest.mark.parametrize(
    ("flags", "checkpoints"),
    [
        ({}, 4), ({"keep_latest_n_ckp": 5}, 7), ({"max_steps": 10, "save_steps": 10, "eval_steps": 10}, 3),
        ({"max_steps": 10, "save_steps": 100, "eval_steps": 100}, 1), ({"max_steps": 1000, "save_steps": 10}, 4),
    ],
)  # fmt: skip
def test_as_many_checkpoints_as_can_lie_together(flags: dict[str, object], checkpoints: int) -> None:
    need = disk_need(config_of(**flags), "float32")
    assert need.checkpoints == checkpoints
    assert need.total_bytes == checkpoints * (need.checkpoint_bytes + BESIDE_BYTES) + need.log_bytes
    assert need.as_dict()["total_bytes"] == need.total_bytes and f"{checkpoints} checkpoint" in need.describe()


def test_a_disk_without_room_for_one_is_refused_and_for_all_is_told(free: list[int], tmp_path: Path) -> None:
    need = disk_need(config_of(), "float32")
    free[0] = need.checkpoint_bytes - 1
    (problem,), notes = too_full(need, tmp_path)
    assert notes == [] and f"--output_dir = {tmp_path}, has " in problem and "one checkpoint takes" in problem
    free[0] = need.total_bytes - 1
    problems, (note,) = too_full(need, tmp_path)
    assert problems == [] and "4 checkpoints of" in note and "--keep_latest_n_ckp" in note
    assert too_full(need, tmp_path, held_bytes=1) == ([], []), "what the run has already will make room"
    free[0] = need.total_bytes
    assert too_full(need, tmp_path) == ([], [])


def test_space_is_asked_of_the_folder_that_is_there(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") > MIB
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(1000))
    assert bytes_below(tmp_path) == 1000 and bytes_below(tmp_path / "missing") == 0
