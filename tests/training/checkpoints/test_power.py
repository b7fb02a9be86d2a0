"""The process is killed, or the power goes, at any change of the disk: what was there is whole, or what is new.

Killed: all that was done is there. Emptied: what was not waited for is empty. Undone: and what was renamed or made and
not waited for is undone besides.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.disk_faults import Fault, PowerLoss, watch_changes
from commands.new_folder import new_folder
from model.formats.checksums import damages
from settings.errors import UserError
from support.storage import write_text
from tests.killing import run_child
from training.checkpoints.folder import Checkpoints, step_of
from training.checkpoints.runs import create_run, delete_replaced_run, publish, resume_run

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs the names of open files"),
    pytest.mark.parametrize("how", ["killed", "emptied", "undone"]),
]


def write(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(folder.name[-1])
    (folder / "state").mkdir()
    (folder / "state" / "training.json").write_text(folder.name[-1])


def disks_of(folder: Path, how: str, before: Callable[[Path], None], work: Callable[[Path], None]) -> list[Path]:
    """The disks that are left where it happens after each change of `work`; the last one, right after it."""
    disk = folder / "disk"
    disks = folder / "disks"
    aside = folder / "aside"
    for new in (disk, disks, aside):
        new.mkdir()
    before(disk)

    def child() -> None:
        loss = PowerLoss(Fault("power", below=str(disk), undoes=how == "undone", log=str(aside / "old")))
        is_copying = False

        def around(name: str, plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            nonlocal is_copying
            if is_copying:
                return plain(*arguments, **named)
            result = loss.change(name, plain, *arguments, **named)
            is_copying = True
            copy = shutil.copytree(disk, disks / f"{loss.count:04d}", symlinks=True)
            if how != "killed":
                loss.lose(str(copy))
            is_copying = False
            return result

        watch_changes(around)
        work(disk)

    assert run_child(child) == 0
    return sorted(disks.iterdir())


def begin(disk: Path, word: str, overwrite: bool = False) -> Path:
    fill = lambda folder: write_text(folder / "settings.json", word)  # noqa: E731
    return create_run(disk / "runs", "r", "pretrain", overwrite=overwrite, fill=fill)


def save(disk: Path, step: int, is_best: bool = False) -> Path:
    return Checkpoints(disk / "runs" / "r", keep_latest=1).save(step, write, is_best)


def test_a_run_that_is_replaced(tmp_path: Path, how: str) -> None:
    def before(disk: Path) -> None:
        begin(disk, "old")
        save(disk, 1)

    def replace(disk: Path) -> None:
        delete_replaced_run(begin(disk, "new", overwrite=True))

    for number, disk in enumerate(disks_of(tmp_path, how, before, replace)):
        run_dir = disk / "runs" / "r"
        intact = [path for path in (run_dir, run_dir.with_name(".old-r")) if path.is_dir()]
        assert intact and (intact[0] / "settings.json").read_text() in ("old", "new")
        if number % 2:
            delete_replaced_run(begin(disk, "newer", overwrite=True))
        elif run_dir.is_dir():
            resume_run(run_dir)
        else:
            with pytest.raises(UserError, match="exists"):
                begin(disk, "newer")
            assert (run_dir / "settings.json").read_text() == "old"
        assert [path.name for path in run_dir.parent.iterdir()] == ["r"]


def test_saves_and_rotation(tmp_path: Path, how: str) -> None:
    def before(disk: Path) -> None:
        begin(disk, "new")
        for step in (1, 2, 3):
            save(disk, step, is_best=step == 1)

    def save_again(disk: Path) -> None:
        save(disk, 4, is_best=True)

    disks = disks_of(tmp_path, how, before, save_again)
    assert len(disks) > 20
    for disk in disks:
        checkpoints = Checkpoints(disk / "runs" / "r", 1)
        (intact, warnings), best = checkpoints.intact(), checkpoints.best()
        assert intact is not None and best is not None and not warnings
        assert (step_of(intact), step_of(best)) in ((3, 1), (4, 4))
        for folder in (intact, best):
            assert damages(folder) == [] and (folder / "model.safetensors").read_text() == str(step_of(folder))
        checkpoints.finish_last_save()
        names = ["step_00000004"] if step_of(intact) == 4 else ["step_00000001", "step_00000003"]
        assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["best", "latest", *names]
        assert [os.readlink(checkpoints.folder / link) for link in ("best", "latest")] == [names[0], names[-1]]
    save(disk, 5)
    assert step_of(intact) == 4, "a save that has returned is on the disk"


def test_publishing(tmp_path: Path, how: str) -> None:
    def before(disk: Path) -> None:
        run_dir = begin(disk, "new")
        publish(save(disk, 1), run_dir)
        save(disk, 2)

    def again(disk: Path) -> None:
        run_dir = disk / "runs" / "r"
        publish(run_dir / "checkpoints" / "step_00000002", run_dir)

    disks = disks_of(tmp_path, how, before, again)
    assert len(disks) > 10
    for disk in disks:
        run_dir = disk / "runs" / "r"
        assert damages(run_dir) == [] and (run_dir / "model.safetensors").read_text() in ("1", "2")
        assert damages(run_dir / "checkpoints" / "step_00000002") == []
    assert (run_dir / "model.safetensors").read_text() == "2"


def test_a_folder_that_a_command_writes_anew(tmp_path: Path, how: str) -> None:
    def make(disk: Path, word: str, overwrite: bool = True) -> None:
        with new_folder(str(disk / "out"), overwrite) as folder:
            (folder / "model").write_text(word)

    for disk in disks_of(tmp_path, how, lambda disk: make(disk, "old"), lambda disk: make(disk, "new")):
        with pytest.raises(UserError, match="exists"):
            make(disk, "never", overwrite=False)
        assert damages(disk / "out") == [] and (disk / "out" / "model").read_text() in ("old", "new")
        make(disk, "newer")
        assert [path.name for path in disk.iterdir()] == ["out"]
