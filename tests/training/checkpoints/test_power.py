"""The power goes at any moment: what was not waited for is empty, or besides undone, and the run is whole all the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults.disk_faults import Fault, start
from model.formats.checksums import damages
from storage import write_text
from tests.killing import run_child
from training.checkpoints.folder import Checkpoints, step_of
from training.checkpoints.runs import create_run, publish, read_run
from training.start.reference import ReferenceStore

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs the names of open files"),
    pytest.mark.parametrize("undoes", [False, True], ids=["emptied", "undone"]),
]


def write(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(folder.name[-1])
    (folder / "state").mkdir()
    (folder / "state" / "training.json").write_text(folder.name[-1])


def lost_at_every_change(
    folder: Path, undoes: bool, before: Callable[[Path], None], work: Callable[[Path], None]
) -> list[Path]:
    """The disks that are left where the power goes after each change of `work`, and at last right after it."""
    disks = []
    while True:
        disk, aside = folder / str(len(disks)) / "disk", folder / str(len(disks)) / "aside"
        disk.mkdir(parents=True), aside.mkdir()
        before(disk)

        def child(disk: Path = disk, aside: Path = aside, number: int = len(disks)) -> None:
            start(Fault("power", number, below=str(disk), undoes=undoes, log=str(aside / "old")))
            work(disk)
            os.mkdir(disk / "after")

        code = run_child(child)
        if code == 0:
            return disks
        assert code == -9
        disks.append(disk)


def save(disk: Path, step: int, is_best: bool = False) -> None:
    Checkpoints(disk / "runs" / "r", keep_latest=1).save(step, write, is_best)


def test_a_new_run_and_its_first_checkpoint(tmp_path: Path, undoes: bool) -> None:
    def begin(disk: Path) -> None:
        fill = lambda folder: write_text(folder / "settings.json", "{}")  # noqa: E731
        create_run(disk / "runs", "r", "pretrain", fill=fill)
        save(disk, 1)

    disks = lost_at_every_change(tmp_path, undoes, lambda disk: None, begin)
    assert len(disks) > 20
    for disk in disks:
        run_dir = disk / "runs" / "r"
        assert not run_dir.exists() or (read_run(run_dir) and (run_dir / "settings.json").read_text() == "{}")
        found = Checkpoints(run_dir, 1).whole()
        assert found is None or (found / "model.safetensors").read_text() == "1"
    assert found is not None, "a save that has returned is on the disk"


def test_saves_and_rotation(tmp_path: Path, undoes: bool) -> None:
    def before(disk: Path) -> None:
        create_run(disk / "runs", "r", "pretrain")
        for step in (1, 2, 3):
            save(disk, step, is_best=step == 1)

    disks = lost_at_every_change(tmp_path, undoes, before, lambda disk: save(disk, 4, is_best=True))
    assert len(disks) > 20
    for disk in disks:
        checkpoints = Checkpoints(disk / "runs" / "r", 1)
        (found, told), best = checkpoints.intact(), checkpoints.best()
        assert found is not None and best is not None and not told
        assert (step_of(found), step_of(best)) in ((3, 1), (4, 4))
        for folder in (found, best):
            assert damages(folder) == [] and (folder / "model.safetensors").read_text() == str(step_of(folder))
        checkpoints.settle()
        save(disk, 5)
    assert step_of(found) == 4, "a save that has returned is on the disk"


def test_publishing(tmp_path: Path, undoes: bool) -> None:
    def before(disk: Path) -> None:
        run_dir = create_run(disk / "runs", "r", "pretrain")
        save(disk, 1)
        publish(run_dir / "checkpoints" / "step_00000001", run_dir)
        save(disk, 2)

    def again(disk: Path) -> None:
        run_dir = disk / "runs" / "r"
        publish(run_dir / "checkpoints" / "step_00000002", run_dir)

    disks = lost_at_every_change(tmp_path, undoes, before, again)
    assert len(disks) > 10
    for disk in disks:
        run_dir = disk / "runs" / "r"
        assert damages(run_dir) == [] and (run_dir / "model.safetensors").read_text() in ("1", "2")
        assert damages(run_dir / "checkpoints" / "step_00000002") == []
    assert (run_dir / "model.safetensors").read_text() == "2"


def test_reference_log_probabilities(tmp_path: Path, undoes: bool) -> None:
    """Rows that were written once are on the disk, or the store is not there: else the run could not go on."""

    def fill(disk: Path) -> None:
        for name in ("train", "validation"):
            store = ReferenceStore(disk / "reference" / f"{name}.npy", 4)
            store.write(np.array([0, 1, 3]), np.ones((3, 2), np.float32))

    disks = lost_at_every_change(tmp_path, undoes, lambda disk: None, fill)
    for disk in disks:
        for path in (disk / "reference").glob("*.npy"):
            if not path.name.startswith("."):
                assert ReferenceStore(path, 4).unknown().sum() in (1, 4)
    assert ReferenceStore(disks[-1] / "reference" / "train.npy", 4).unknown().sum() == 1
