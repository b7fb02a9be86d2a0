"""Whatever happens while a checkpoint is written, the one before it is whole; what is damaged is passed over."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.disk_faults import Fault, start
from settings.errors import UserError
from tests.killing import run_child
from training.checkpoints.folder import Checkpoints, step_of


def write_file(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_text(content)
        (folder / "state").mkdir()
        (folder / "state" / "training.json").write_text(content)

    return write


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a", keep_latest=2)
    assert checkpoints.latest() is None and checkpoints.best() is None
    for step in range(10, 60, 10):
        folder = checkpoints.save(step, write_file(str(step)), is_best=step == 20)
        assert folder == checkpoints.latest() and step_of(folder) == step
    assert names(tmp_path / "a") == ["best", "latest", "step_00000020", "step_00000040", "step_00000050"]
    (tmp_path / "a").rename(tmp_path / "b")
    best = Checkpoints(tmp_path / "b", keep_latest=2).best()
    assert best is not None and best.name == "step_00000020"


@pytest.mark.skipif(os.name == "nt", reason="os.fork")
def test_a_disk_that_fails_from_any_change_on(tmp_path: Path) -> None:
    """Full, read-only or broken: told in a sentence, the checkpoint before is whole, and the next save is as ever."""
    for step in (1, 2, 3):
        Checkpoints(tmp_path / "run", keep_latest=1).save(step, write_file(str(step)), is_best=step == 1)
    for number in range(1000):
        run_dir = shutil.copytree(tmp_path / "run", tmp_path / str(number), symlinks=True)
        checkpoints = Checkpoints(run_dir, keep_latest=1)

        def save(checkpoints: Checkpoints = checkpoints, number: int = number) -> None:
            start(Fault("error", number, error=errno.ENOSPC))
            try:
                checkpoints.save(4, write_file("4"), is_best=True)
            except UserError as error:
                (problem,) = error.problems
                assert os.strerror(errno.ENOSPC) in problem and "is whole; " in problem
                os._exit(2)

        code = run_child(save)
        intact, warnings = Checkpoints(run_dir, keep_latest=1).intact()
        assert intact is not None and not warnings and code in (0, 2)
        assert (intact / "model.safetensors").read_text() == str(step_of(intact))
        assert step_of(intact) == 4 or code == 2, "what was not written is told"
        checkpoints.save(5, write_file("5"), is_best=True)
        assert names(run_dir) == ["best", "latest", "step_00000005"]
        if code == 0:  # from here on only removing old ones fails, which is tried again
            break
    assert number > 9, "every change was a moment of its own"


def test_a_disk_that_is_no_longer_mounted_is_not_written_below_its_place(tmp_path: Path) -> None:
    (tmp_path / "place" / "run").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path / "place" / "run", keep_latest=1)
    checkpoints.save(1, write_file("1"))
    (tmp_path / "place" / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is gone"):
        checkpoints.save(2, write_file("2"))
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize(
    ("file", "how"), [("model.safetensors", "cut"), ("state/training.json", "changed"), ("checksums.json", "gone")]
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, file: str, how: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=3)
    for step in (10, 20, 30):
        checkpoints.save(step, write_file(str(step)), is_best=step != 20)
    path = tmp_path / "checkpoints" / "step_00000030" / file
    if how == "gone":
        path.unlink()
    else:
        path.write_text(path.read_text()[:-1] if how == "cut" else "x" + path.read_text()[1:])
    intact, warnings = checkpoints.intact()
    assert intact is not None
    assert step_of(intact) == 20 and file in warnings[0] and "continuing from step 20" in warnings[0]
    assert checkpoints.latest() == intact and checkpoints.best() == intact.with_name("step_00000010")
    assert names(tmp_path) == ["best", "damaged-step_00000030", "latest", "step_00000010", "step_00000020"]
    assert os.path.realpath(tmp_path / "checkpoints" / "latest") == str(intact)
    checkpoints.save(30, write_file("30"))
    assert "damaged-step_00000030" not in names(tmp_path), "its step was done again"


def test_the_best_is_not_forgotten_where_it_is_damaged(tmp_path: Path) -> None:
    """Else the newest would be published in its place, without a word."""
    checkpoints = Checkpoints(tmp_path, keep_latest=1)
    best = checkpoints.save(1, write_file("1"), is_best=True)
    (best / "model.safetensors").write_text("")
    for step in (2, 3):
        checkpoints.save(step, write_file(str(step)))
    assert checkpoints.named_best() == best and best.is_dir() and checkpoints.best() is None
