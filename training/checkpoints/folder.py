"""How does a checkpoint survive whatever happens while it is written?

It is written into a hidden folder, flushed to the disk, and renamed: that rename is the one moment at which it comes to
be. A folder called `step_*` is whole; its `checksums.json` says so of every file, and which checkpoint was the best when
it was written. So the latest and the best are read from the folders themselves. `latest` and `best` are links for people
and scripts, set afterwards; nothing here depends on them. Old ones go, again by a rename first. Whatever a kill leaves
behind is hidden, and cleared by the next start or save.

    <output_dir>/<run_name>/run.json          see `training/checkpoints/runs.py`
    <output_dir>/<run_name>/checkpoints/step_00000050/   a whole model folder, and state/ for resuming
    <output_dir>/<run_name>/checkpoints/latest, best     links; where links are impossible, small text files
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from model.formats.checksums import CHECKSUMS_FILE, damages, read_sums, seal
from settings.errors import UserError, reason_of
from storage import TEMPORARY, make_folder, remove, sync, sync_folder

REPLACED, DAMAGED = ".replaced-", "damaged-"
MEAN = f"{TEMPORARY}mean"  # of the last checkpoints, as long as it is evaluated (`training.averaging`)
BEST_STEP = "best_step"  # in checksums.json: the step of the best checkpoint when this one was written
_STEP = re.compile(r"step_(\d{8,18})")
# safetensors and torch.save tell of a full disk in errors of their own
_WRITE_FAILURES = ("os error", "no space left", "file write failed", "failed writing file", "unexpected pos")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run_dir: the run's folder.
        keep_latest: how many are kept beside the best one, 1 or more.
        is_main: other processes write nothing.
    """

    def __init__(self, run_dir: str | Path, keep_latest: int, is_main: bool = True) -> None:
        self.folder = Path(run_dir) / "checkpoints"
        self.keep_latest = keep_latest
        self._is_main = is_main
        self._had_run_dir = self.folder.parent.is_dir()

    def save(self, step: int, write: Callable[[Path], None], is_best: bool = False) -> Path:
        """Write the checkpoint of one step, then drop those that are too old.

        Args:
            step: the steps done.
            write: fills the empty folder it is given.
            is_best: whether this one is the best of all so far.
        Returns:
            the checkpoint's folder.
        Raises:
            UserError: the disk is full or cannot be written; the checkpoints before this one are whole.
        """
        final = self.folder / name_of(step)
        if not self._is_main:
            return final
        temporary = self.folder / f"{TEMPORARY}{final.name}"
        try:
            if self._had_run_dir and not self.folder.parent.is_dir():  # made again, it would lie below the mount point
                raise OSError(errno.ENOENT, f"{self.folder.parent} is gone, as with a disk that is no longer mounted")
            self.clear_leftovers()
            make_folder(self.folder)
            temporary.mkdir()
            write(temporary)
            best = None if is_best else self.named_best()
            seal(temporary, **{BEST_STEP: step if is_best else None if best is None else step_of(best)})
            sync(temporary)
            self.put_in_place(temporary, final)
            self.point()
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if _is_write_failure(error):
                raise self.failure(step, error) from error
            raise
        self._rotate()
        return final

    def latest(self) -> Path | None:
        """The newest checkpoint that has all its files, in full length; None before the first."""
        return next((path for path in self._all() if not self._wrong(path, deep=False)), None)

    def last(self, count: int) -> list[Path]:
        """The last checkpoints, oldest first: so many, or as many as are kept, of which every byte is as it was written."""
        return [path for path in self._all()[: min(count, self.keep_latest)][::-1] if not self._wrong(path)]

    def best(self) -> Path | None:
        """The checkpoint with the best evaluation, if it has all its files; None before the first evaluation."""
        named = self.named_best()
        return named if named is not None and named.is_dir() and not damages(named, deep=False) else None

    def named_best(self) -> Path | None:
        """The checkpoint with the best evaluation as the newest one knows it, whatever has become of its files since."""
        for path in self._all():
            if not self._wrong(path, deep=False) and BEST_STEP in (sums := read_sums(path) or {}):
                number = sums[BEST_STEP]
                named = self.folder / name_of(number) if type(number) is int and number >= 0 else None
                return named if named is not None and _STEP.fullmatch(named.name) else None
        return resolve(self.folder / "best")  # of a run that knew no sums

    def whole(self) -> Path | None:
        """The newest checkpoint of which every byte is as it was written; changes nothing."""
        return next((path for path in self._all() if not self._wrong(path)), None)

    def intact(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint of which every byte is as it was written, for going on; newer ones are set aside.

        Returns:
            it, and what is to be told of those that are damaged.
        Raises:
            UserError: there are checkpoints, and all of them are damaged. OSError: the folder cannot be written.
        Time: one reading of the checkpoint.
        """
        self.clear_leftovers()
        passed: list[tuple[Path, list[str]]] = []
        for path in self._all():
            found = self._wrong(path)
            if not found:
                for damaged, _ in passed:
                    self._set_aside(damaged)
                if passed:
                    self.point()
                return path, [f"{'; '.join(wrong)}: continuing from step {step_of(path)}" for _, wrong in passed]
            passed.append((path, found))
        if passed:
            raise UserError(
                *(f"checkpoint = {path}, {'; '.join(wrong)}; copy it again" for path, wrong in passed),
                "--is_keep_training = True, no checkpoint is whole; start again with --overwrite=True",
            )
        return None, []

    def _wrong(self, path: Path, deep: bool = True) -> list[str]:
        """What is wrong with a checkpoint; one without sums is half a copy where one before it has them."""
        if (path / CHECKSUMS_FILE).is_file() or not any(
            (older / CHECKSUMS_FILE).is_file() for older in self._all() if step_of(older) < step_of(path)
        ):
            return damages(path, deep)
        return [f"{path / CHECKSUMS_FILE} is missing: not all of the checkpoint is there"]

    def _set_aside(self, path: Path) -> None:
        with suppress(OSError):  # it stays out of the way by its sums as well
            remove(path.with_name(f"{DAMAGED}{path.name}"))
            os.replace(path, path.with_name(f"{DAMAGED}{path.name}"))

    def _all(self) -> list[Path]:
        """All checkpoints, newest first."""
        found = [path for path in self.folder.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=step_of, reverse=True)

    def clear_leftovers(self) -> None:
        """Remove what a killed process has left half written, and nothing else.

        Raises:
            OSError: the folder cannot be written.
        """
        for path in self.folder.glob(f"{REPLACED}step_*"):
            original = self.folder / path.name.removeprefix(REPLACED)
            if _STEP.fullmatch(original.name) and not original.exists():
                os.replace(path, original)  # killed between the two renames of a replacement
        for pattern in (f"{TEMPORARY}step_*", f"{REPLACED}step_*", f"{TEMPORARY}latest", f"{TEMPORARY}best", MEAN):
            for path in self.folder.glob(pattern):
                remove(path)

    def put_in_place(self, temporary: Path, final: Path) -> None:
        """Give a whole folder its name: from here on the checkpoint exists.

        Raises:
            OSError: the folder cannot be written; a checkpoint of that name from before is whole.
        """
        aside = self.folder / f"{REPLACED}{final.name}"
        if final.exists():
            os.replace(final, aside)
        os.replace(temporary, final)
        sync_folder(self.folder)
        if aside.exists():
            remove(aside)

    def point(self) -> None:
        """Let the links name what is the latest and the best."""
        for name, target in (("latest", self.latest()), ("best", self.best())):
            if target is not None:
                point(self.folder / name, target)
            else:
                (self.folder / name).unlink(missing_ok=True)

    def settle(self) -> None:
        """Do what a process that was killed after its last save has left undone: the links, and dropping the old ones.

        Raises:
            OSError: the folder cannot be written.
        """
        if self._all():
            self.point()
            self._rotate()

    def _rotate(self) -> None:
        best, newest = self.named_best(), self._all()
        for path in newest[self.keep_latest :]:
            if best is None or path.name != best.name:
                self._drop(path)
        for path in self.folder.glob(f"{DAMAGED}step_*"):
            name = _STEP.fullmatch(path.name.removeprefix(DAMAGED))
            if name and int(name.group(1)) <= step_of(newest[0]):
                self._drop(path)  # its step has been done again

    def _drop(self, path: Path) -> None:
        going = self.folder / f"{TEMPORARY}{path.name.removeprefix(DAMAGED)}"
        with suppress(OSError):  # what cannot be removed now is tried again after the next save
            os.replace(path, going)
            remove(going)

    def failure(self, step: int, error: BaseException) -> UserError:
        """What is said of a checkpoint that cannot be written."""
        last = self.latest()
        kept = f"the checkpoint of step {step_of(last)} is whole" if last else "there is no earlier checkpoint"
        going_on = f"; --is_keep_training=True --run_name={shlex.quote(self.folder.parent.name)} continues from there"
        advice = "free space or name another --output_dir" + (going_on if last else "")
        place = f"--output_dir = {self.folder.parent.parent}"
        return UserError(f"{place}, cannot be written at step {step}: {reason_of(error)}; {kept}; {advice}")


def name_of(step: int) -> str:
    """The folder's name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The number of steps after a checkpoint, read from its name."""
    match = _STEP.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is no checkpoint"
    return int(match.group(1))


def resolve(pointer: Path) -> Path | None:
    """Follow `latest` or `best`, be it a link or a text file, to its folder; None if it leads nowhere."""
    with suppress(OSError, UnicodeDecodeError):
        name = os.readlink(pointer) if pointer.is_symlink() else pointer.read_text(encoding="utf8").strip()
        target = pointer.parent / name
        if _STEP.fullmatch(name) and target.is_dir():
            return target
    return None


def point(pointer: Path, target: Path) -> None:
    """Let a pointer name a folder beside it, at once."""
    fresh = pointer.with_name(f"{TEMPORARY}{pointer.name}")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(target.name, target_is_directory=True)
    except (OSError, NotImplementedError):  # Windows without the right to make links, FAT, some network drives
        fresh.write_text(f"{target.name}\n", encoding="utf8")
    os.replace(fresh, pointer)


def _is_write_failure(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, OSError) or (
        isinstance(error, Exception) and any(sign in text for sign in _WRITE_FAILURES)
    )
