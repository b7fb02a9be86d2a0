"""A checkpoint that is no longer as it was written is told and passed by; what was the best is not forgotten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from settings.errors import UserError
from tests.training.checkpoints.test_folder import names, write_file
from training.checkpoints.folder import Checkpoints, step_of


def spoil(path: Path, how: str) -> None:
    if how == "cut":
        path.write_text(path.read_text()[:-2])
    elif how == "changed":
        path.write_text("x" + path.read_text()[1:])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
@pytest.mark.parametrize("file", ["model.safetensors", "state/training.json", "checksums.json"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, file: str, how: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=3)
    for step in (10, 20, 30):
        checkpoints.save(step, write_file(str(step)), is_best=step != 20)
    spoil(tmp_path / "checkpoints" / "step_00000030" / file, how)
    path, told = checkpoints.intact()
    assert path is not None
    assert step_of(path) == 20 and file in told[0] and "continuing from step 20" in told[0]
    assert checkpoints.latest() == path and checkpoints.best() == path.with_name("step_00000010")
    assert names(tmp_path) == ["best", "damaged-step_00000030", "latest", "step_00000010", "step_00000020"]
    assert os.path.realpath(tmp_path / "checkpoints" / "latest") == str(path)
    checkpoints.save(30, write_file("30"))
    assert "damaged-step_00000030" not in names(tmp_path), "its step was done again"


def test_half_a_copy_of_a_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    """What copies a run file by file and breaks off has not yet copied the sums, or anything."""
    checkpoints = Checkpoints(tmp_path, keep_latest=3)
    checkpoints.save(1, write_file("1"), is_best=True)
    for number in (2, 3):
        (tmp_path / "checkpoints" / f"step_0000000{number}").mkdir()
    (tmp_path / "checkpoints" / "step_00000002" / "model.safetensors").write_text("hal")
    assert (
        checkpoints.latest() == checkpoints.whole() == checkpoints.best() == tmp_path / "checkpoints" / "step_00000001"
    )
    path, told = checkpoints.intact()
    assert (
        path is not None and step_of(path) == 1 and len(told) == 2 and "not all of the checkpoint is there" in told[1]
    )


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_the_best_is_not_forgotten_where_it_is_damaged(tmp_path: Path, how: str) -> None:
    """Else the newest would be published in its place, without a word."""
    checkpoints = Checkpoints(tmp_path, keep_latest=1)
    best = checkpoints.save(1, write_file("1"), is_best=True)
    spoil(best / "model.safetensors", how)
    for step in (2, 3):
        checkpoints.save(step, write_file(str(step)))
    assert checkpoints.named_best() == best and best.is_dir() and checkpoints.best() is None
    checkpoints.save(4, write_file("4"), is_best=True)
    assert names(tmp_path) == ["best", "latest", "step_00000004"]


def test_nothing_but_damaged_checkpoints_is_told(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=3)
    for step in (1, 2):
        checkpoints.save(step, write_file(str(step)))
        spoil(tmp_path / "checkpoints" / f"step_0000000{step}" / "model.safetensors", "changed")
    with pytest.raises(UserError, match="no checkpoint is whole") as caught:
        checkpoints.intact()
    assert len(caught.value.problems) == 3
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]
