"""Whatever happens while a checkpoint is written, the one before it is whole."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.disk_faults import Fault, start
from settings.errors import UserError
from tests.killing import DIED, die_at, run_child
from training.checkpoints.folder import Checkpoints, resolve, step_of


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
@pytest.mark.parametrize("moment", ["write", "sync", "point", "_rotate"])
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
    assert step_of(latest) == (2 if moment in ("point", "_rotate") else 1)
    checkpoints.save(2, write_file("2"))
    checkpoints.save(3, write_file("3"))
    assert names(tmp_path) == ["latest", "step_00000002", "step_00000003"]


def _die_while_saving(run_dir: Path, moment: str) -> None:
    from training.checkpoints import folder as module

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


def three_saved(run_dir: Path) -> Checkpoints:
    """A run with saves 1 (the best), 2 and 3, which keeps one beside the best."""
    checkpoints = Checkpoints(run_dir, keep_latest=1)
    for step in (1, 2, 3):
        checkpoints.save(step, write_file(str(step)), is_best=step == 1)
    return checkpoints


@pytest.mark.skipif(os.name == "nt", reason="os.fork")
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("is_best", [False, True])
def test_a_kill_at_every_single_change_of_the_disk(tmp_path: Path, is_best: bool, is_after: bool) -> None:
    """Saves 1 (the best), 2 and 3; dies while saving 4. Whatever moment that is, latest and best are whole and right."""
    for number in range(1000):
        run_dir = tmp_path / str(number)
        checkpoints = three_saved(run_dir)

        def save(checkpoints: Checkpoints = checkpoints, number: int = number) -> None:
            die_at(number, is_after)
            checkpoints.save(4, write_file("4"), is_best=is_best)

        code = run_child(save)
        again = Checkpoints(run_dir, keep_latest=1)
        (found, told), best = again.intact(), again.best()
        assert not told and found is not None and found == again.latest() and best is not None
        assert step_of(found) in (3, 4)
        assert step_of(best) == (4 if is_best and step_of(found) == 4 else 1)
        for folder in (found, best):
            assert (folder / "model.safetensors").read_text() == str(step_of(folder))
        again.clear_leftovers()
        assert not list((run_dir / "checkpoints").glob(".*"))
        again.save(5, write_file("5"))
        assert again.best() == best and again.latest() == run_dir / "checkpoints" / "step_00000005"
        if code == 0:
            break
        assert code == DIED
    assert number > 9, "every change was a moment of its own"


@pytest.mark.skipif(os.name == "nt", reason="os.fork")
@pytest.mark.parametrize("is_after", [False, True])
def test_what_a_kill_after_the_last_save_has_left_undone_is_done_by_the_next_start(
    tmp_path: Path, is_after: bool
) -> None:
    """A run that has nothing more to do saves nothing more: its links would lead astray, and its old ones stay for good."""
    for number in range(1000):
        run_dir = tmp_path / str(number)
        checkpoints = three_saved(run_dir)

        def save(checkpoints: Checkpoints = checkpoints, number: int = number) -> None:
            die_at(number, is_after)
            checkpoints.save(4, write_file("4"), is_best=True)

        code = run_child(save)
        again = Checkpoints(run_dir, keep_latest=1)
        again.clear_leftovers()
        again.settle()
        done = again.latest() == run_dir / "checkpoints" / "step_00000004"
        kept = ["step_00000004"] if done else ["step_00000001", "step_00000003"]
        assert names(run_dir) == ["best", "latest", *kept]
        for link, target in (("best", kept[0]), ("latest", kept[-1])):
            assert os.readlink(run_dir / "checkpoints" / link) == target
        if code == 0:
            break
        assert code == DIED


FAILURES = [errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EROFS, errno.EIO, errno.ENOENT]


@pytest.mark.skipif(os.name == "nt", reason="os.fork")
@pytest.mark.parametrize("failure", FAILURES, ids=lambda number: errno.errorcode[number])
def test_a_disk_that_fails_from_any_change_on(tmp_path: Path, failure: int) -> None:
    """Full, over its quota, read-only, broken or gone: told in a sentence, the checkpoint before is whole, and the next save is as ever."""
    for number in range(1000):
        run_dir = tmp_path / str(number)
        checkpoints = three_saved(run_dir)

        def save(checkpoints: Checkpoints = checkpoints, number: int = number) -> None:
            start(Fault("error", number, error=failure))
            try:
                checkpoints.save(4, write_file("4"), is_best=True)
            except UserError as error:
                (problem,) = error.problems
                assert os.strerror(failure) in problem and "is whole; " in problem
                os._exit(2)

        code = run_child(save)
        found, told = Checkpoints(run_dir, keep_latest=1).intact()
        assert found is not None and not told and code in (0, 2)
        assert (found / "model.safetensors").read_text() == str(step_of(found))
        assert step_of(found) == 4 or code == 2, "what was not written is told"
        checkpoints.save(5, write_file("5"), is_best=True)
        assert names(run_dir) == ["best", "latest", "step_00000005"]
        if code == 0:  # from here on only dropping old ones fails, which is tried again
            break
    assert number > 9, "every change was a moment of its own"


def test_a_disk_that_is_no_longer_mounted_is_not_written_below_its_place(tmp_path: Path) -> None:
    (tmp_path / "place" / "run").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path / "place" / "run", keep_latest=1)
    checkpoints.save(1, write_file("1"))
    (tmp_path / "place" / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"cannot be written at step 2: .*place/run is gone"):
        checkpoints.save(2, write_file("2"))
    assert list((tmp_path / "place").iterdir()) == []
    (tmp_path / "elsewhere").rename(tmp_path / "place" / "run")
    checkpoints.save(2, write_file("2"))
    assert names(tmp_path / "place" / "run") == ["latest", "step_00000002"]


@pytest.mark.parametrize("best", [-1, "1", "../../x", 10**30, True, None, 7])
def test_the_record_of_the_best_leads_nowhere_else(tmp_path: Path, best: object) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=3)
    path = checkpoints.save(1, write_file("1"), is_best=True)
    sums = json.loads((path / "checksums.json").read_text())
    (path / "checksums.json").write_text(json.dumps({**sums, "best_step": best}))
    assert checkpoints.best() is None


def test_a_run_of_before_has_its_best_by_the_link(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=1)
    for step in (1, 2):
        checkpoints.save(step, write_file(str(step)), is_best=step == 1)
    for sums in (tmp_path / "checkpoints").glob("step_*/checksums.json"):
        sums.unlink()
    assert checkpoints.best() == tmp_path / "checkpoints" / "step_00000001"
    checkpoints.save(3, write_file("3"))
    (tmp_path / "checkpoints" / "best").unlink()
    assert checkpoints.best() == tmp_path / "checkpoints" / "step_00000001", "written down by now"


def test_foreign_hidden_files_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / ".tmp-mine").mkdir(parents=True)
    (folder / ".replaced-step_x").mkdir()
    Checkpoints(tmp_path, keep_latest=1).save(1, write_file("1"))
    assert (folder / ".tmp-mine").is_dir()
