"""Whatever happens while a checkpoint is written, the one before it is whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from settings import UserError
from training.checkpoints import Checkpoints, resolve, step_of


def write_file(content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_text(content)
        (folder / "state").mkdir()
        (folder / "state" / "training.json").write_text(content)

    return write


def full_disk(folder: Path) -> None:
    (folder / "model.safetensors").write_text("half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def no_links(self: Path, target: object, target_is_directory: bool = False) -> None:
    raise OSError(errno.EPERM, "no links here")


@pytest.fixture(params=["links", "text files"])
def pointers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "text files":
        monkeypatch.setattr(Path, "symlink_to", no_links)


@pytest.mark.usefixtures("pointers")
def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=2)
    assert checkpoints.latest() is None and checkpoints.best() is None
    for step in range(10, 60, 10):
        folder = checkpoints.save(step, write_file(str(step)), is_best=step == 20)
        assert folder == checkpoints.latest() and step_of(folder) == step
    assert names(tmp_path) == ["best", "latest", "step_00000020", "step_00000040", "step_00000050"]
    best = checkpoints.best()
    assert best is not None and (best / "state" / "training.json").read_text() == "20"
    checkpoints.save(60, write_file("60"), is_best=True)
    assert names(tmp_path) == ["best", "latest", "step_00000050", "step_00000060"]


@pytest.mark.usefixtures("pointers")
def test_pointers_survive_each_other(tmp_path: Path) -> None:
    """A folder that was copied from one file system to another may hold either kind."""
    checkpoints = Checkpoints(tmp_path, keep_latest=3)
    checkpoints.save(1, write_file("1"), is_best=True)
    (tmp_path / "checkpoints" / "latest").unlink()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000001\n")
    checkpoints.save(2, write_file("2"), is_best=True)
    latest = checkpoints.latest()
    assert latest is not None and step_of(latest) == 2
    assert checkpoints.best() == latest


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_pointers_are_relative_links(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a", keep_latest=1)
    checkpoints.save(1, write_file("1"), is_best=True)
    (tmp_path / "a").rename(tmp_path / "b")
    assert (tmp_path / "b" / "checkpoints" / "latest" / "model.safetensors").read_text() == "1"


@pytest.mark.parametrize("content", ["", "../../etc", "/etc", "step_00000009", "step_1/../..", "\xff"])
def test_a_pointer_leads_nowhere_else(tmp_path: Path, content: str) -> None:
    (tmp_path / "latest").write_text(content, encoding="latin1")
    assert resolve(tmp_path / "latest") is None
    assert resolve(tmp_path / "missing") is None


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", keep_latest=1)
    checkpoints.save(10, write_file("10"), is_best=True)
    before = names(tmp_path / "run")
    with pytest.raises(UserError) as caught:
        checkpoints.save(20, full_disk, is_best=True)
    (problem,) = caught.value.problems
    for part in (f"--output_dir = {tmp_path}", "step 20", "No space left", "step 10 is whole", "--is_keep_training"):
        assert part in problem
    assert names(tmp_path / "run") == before, "nothing half-written is left"
    latest = checkpoints.latest()
    assert latest is not None and step_of(latest) == 10 and (latest / "model.safetensors").read_text() == "10"
    checkpoints.save(30, write_file("30"))  # there is room again
    assert names(tmp_path / "run") == ["best", "latest", "step_00000010", "step_00000030"]


def test_a_full_disk_as_safetensors_and_torch_tell_it(tmp_path: Path) -> None:
    for text in ("I/O error: No space left on device (os error 28)", "PytorchStreamWriter failed writing file data/0"):

        def write(folder: Path, text: str = text) -> None:
            raise RuntimeError(text)

        with pytest.raises(UserError, match="there is no earlier checkpoint"):
            Checkpoints(tmp_path, keep_latest=1).save(1, write)


def test_a_full_disk_at_the_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=1)
    checkpoints.save(1, write_file("1"))

    def no_room(self: Path, *args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", no_links)
        patch.setattr(Path, "write_text", no_room)
        with pytest.raises(UserError, match="No space left"):
            checkpoints.save(2, lambda folder: None)
    latest = checkpoints.latest()
    assert latest is not None and latest.is_dir()


def test_our_own_mistakes_stay_visible(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=1)
    checkpoints.save(1, write_file("1"))

    def wrong(folder: Path) -> None:
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError):
        checkpoints.save(2, wrong)
    assert names(tmp_path) == ["latest", "step_00000001"]


@pytest.mark.skipif(os.name == "nt", reason="os.kill")
@pytest.mark.parametrize("moment", ["write", "_flush", "point", "_rotate"])
def test_a_kill_at_any_moment(tmp_path: Path, moment: str) -> None:
    """A child saves step 1, then dies in the middle of saving step 2; a new process finds a whole checkpoint."""
    pid = os.fork()
    if pid == 0:
        try:
            _die_while_saving(tmp_path, moment)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 77
    checkpoints = Checkpoints(tmp_path, keep_latest=2)
    latest = checkpoints.latest()
    assert latest is not None and (latest / "model.safetensors").read_text() == str(step_of(latest))
    assert step_of(latest) == (2 if moment == "_rotate" else 1)
    checkpoints.save(2, write_file("2"))
    checkpoints.save(3, write_file("3"))
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000003"]


def _die_while_saving(run_dir: Path, moment: str) -> None:
    from training import checkpoints as module

    checkpoints = Checkpoints(run_dir, keep_latest=2)
    checkpoints.save(1, write_file("1"))

    def die(*args: object) -> None:
        os._exit(77)

    if moment == "write":
        checkpoints.save(2, die)
    owner = Checkpoints if moment == "_rotate" else module
    setattr(owner, moment, die)
    checkpoints.save(2, write_file("2"))


def test_a_kill_between_the_renames_of_a_replacement(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=2)
    checkpoints.save(1, write_file("1"), is_best=True)
    folder = tmp_path / "checkpoints"
    (folder / "step_00000001").rename(folder / ".replaced-step_00000001")
    (folder / ".tmp-step_00000001").mkdir()
    checkpoints.save(2, write_file("2"))
    assert names(tmp_path) == ["best", "latest", "step_00000001", "step_00000002"]
    best = checkpoints.best()
    assert best is not None and (best / "model.safetensors").read_text() == "1"


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=2)
    checkpoints.save(1, write_file("old"))
    folder = checkpoints.save(1, write_file("new"), is_best=True)
    assert (folder / "model.safetensors").read_text() == "new"
    assert names(tmp_path) == ["best", "latest", "step_00000001"]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=1, is_main=False)
    assert checkpoints.save(1, full_disk) == tmp_path / "checkpoints" / "step_00000001"
    assert list(tmp_path.iterdir()) == []
