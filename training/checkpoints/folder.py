"""The checkpoints of a run: whole folders, of which the newest and the best are kept.

A checkpoint comes to be by one rename (`storage.atomic_folder`). Its `checksums.json` has the sum of every file, and
which checkpoint was the best when it was written, so the latest and the best are read from the folders themselves; the
links `latest` and `best` are for people and scripts.

    <output_dir>/<run_name>/run.json          see `training/checkpoints/runs.py`
    <output_dir>/<run_name>/checkpoints/step_00000050/   a whole model folder, and state/ for resuming
    <output_dir>/<run_name>/checkpoints/latest, best     links; where links are impossible, small text files
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.language import join, say
from common.storage import REPLACED, TEMPORARY, atomic_file, atomic_folder, clear_leftovers, remove, rename
from model.formats.checksums import CHECKSUMS_FILE, damages, read_sums, seal
from settings.errors import UserError, reason_of

DAMAGED = "damaged-"
MEAN = f"{TEMPORARY}mean"  # of the last checkpoints, as long as it is evaluated (`training.averaging`)
BEST_STEP = "best_step"  # in checksums.json: the step of the best checkpoint when this one was written
_STEP = re.compile(r"step_(\d{8,18})")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run_dir: the run's folder.
        keep_latest: how many are kept beside the best one, 1 or more.
    """

    def __init__(self, run_dir: str | Path, keep_latest: int) -> None:
        self.folder = Path(run_dir) / "checkpoints"
        self.keep_latest = keep_latest
        self._had_run_dir = self.folder.parent.is_dir()

    def save(self, step: int, write: Callable[[Path], None], is_best: bool = False) -> Path:
        """Write the checkpoint of one step, then remove those that are too old.

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
        try:
            if self._had_run_dir and not self.folder.parent.is_dir():  # made again, it would lie below the mount point
                raise OSError(
                    errno.ENOENT,
                    say("{parent} is gone, as with a disk that is no longer mounted", parent=self.folder.parent),
                )
            self.clear_leftovers()
            with atomic_folder(final) as temporary:
                write(temporary)
                best = None if is_best else self.named_best()
                seal(temporary, **{BEST_STEP: step if is_best else None if best is None else step_of(best)})
            self._point()
        except OSError as error:
            last = self.latest()
            kept = (
                say("the checkpoint of step {step_of} is whole", step_of=step_of(last))
                if last
                else say("there is no earlier checkpoint")
            )
            resume = say(
                "; --is_keep_training=True --run_name={quote} continues from there",
                quote=shlex.quote(self.folder.parent.name),
            )
            raise UserError(
                "--output_dir = {parent}, cannot be written at step {step}: {reason}; {kept}; free space or choose "
                "another --output_dir{resume}",
                parent=self.folder.parent.parent,
                step=step,
                reason=reason_of(error),
                kept=kept,
                resume=resume if last else "",
            ) from error
        self._rotate()
        return final

    def latest(self) -> Path | None:
        """The newest checkpoint that has all its files, in full length; None before the first."""
        return next((path for path in self._all() if not self._damages(path, deep=False)), None)

    def last(self, count: int) -> list[Path]:
        """The last checkpoints, oldest first: so many, or as many as are kept, of which every byte is as it was
        written.
        """
        return [path for path in self._all()[: min(count, self.keep_latest)][::-1] if not self._damages(path)]

    def best(self) -> Path | None:
        """The checkpoint with the best evaluation, if it has all its files; None before the first evaluation."""
        named = self.named_best()
        return named if named is not None and named.is_dir() and not damages(named, deep=False) else None

    def named_best(self) -> Path | None:
        """The checkpoint with the best evaluation as the newest one knows it, whatever has become of its files
        since.
        """
        known = [path for path in self._all() if not self._damages(path, deep=False)] or self._all()
        for path in known:
            with suppress(UserError):  # even its sums are damaged
                if (sums := read_sums(path)) is not None:
                    step = sums.get(BEST_STEP)
                    named = self.folder / name_of(step) if type(step) is int and step >= 0 else None
                    return named if named is not None and _STEP.fullmatch(named.name) else None
        return None

    def intact(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint of which every byte is as it was written, to continue from; newer ones are set aside.

        Returns:
            it, and a warning for each that is damaged.
        Raises:
            UserError: there are checkpoints, and all of them are damaged. OSError: the folder cannot be written.
        Time: one reading of the checkpoint.
        """
        self.clear_leftovers()
        damaged: dict[Path, str] = {}
        for path in self._all():
            if found := self._damages(path):
                damaged[path] = join("; ", found)
                continue
            for newer in damaged:
                with suppress(OSError):  # its sums keep it from being used as well
                    remove(newer.with_name(f"{DAMAGED}{newer.name}"))
                    rename(newer, newer.with_name(f"{DAMAGED}{newer.name}"))
            if damaged:
                self._point()
            return path, [
                say("{wrong}: continuing from step {step_of}", wrong=wrong, step_of=step_of(path))
                for wrong in damaged.values()
            ]
        if damaged:
            raise UserError(
                *(
                    say("checkpoint = {path}, {wrong}; copy it again", path=path, wrong=wrong)
                    for path, wrong in damaged.items()
                ),
                say("--is_keep_training = True, no checkpoint is whole; start again with --overwrite=True"),
            )
        return None, []

    def clear_leftovers(self) -> None:
        """Remove what a killed process has left half written; raises OSError."""
        for sign in (REPLACED, TEMPORARY):
            for path in self.folder.glob(f"{sign}*"):
                clear_leftovers(self.folder / path.name.removeprefix(sign))

    def finish_last_save(self) -> None:
        """Do what a process that was killed after its last save has left undone: links, and removing old ones; raises
        OSError.
        """
        if self._all():
            self._point()
            self._rotate()

    def _all(self) -> list[Path]:
        """All checkpoints, newest first."""
        found = [path for path in self.folder.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=step_of, reverse=True)

    def _damages(self, path: Path, deep: bool = True) -> list[str]:
        """What is wrong with a checkpoint. Without its sums, which are written last, it is half a copy."""
        sums = path / CHECKSUMS_FILE
        if not sums.is_file():
            return [say("{sums} is missing: not all of the checkpoint is there", sums=sums)]
        return damages(path, deep)

    def _point(self) -> None:
        """Let the links name what is the latest and the best."""
        for name, target in (("latest", self.latest()), ("best", self.best())):
            if target is None:
                (self.folder / name).unlink(missing_ok=True)
                continue
            with atomic_file(self.folder / name) as pointer:
                try:
                    pointer.symlink_to(target.name, target_is_directory=True)
                except (OSError, NotImplementedError):
                    # Windows without the right to make links, FAT, some network drives
                    pointer.write_text(f"{target.name}\n", encoding="utf8")

    def _rotate(self) -> None:
        best, newest = self.named_best(), self._all()
        outdated = [path for path in newest[self.keep_latest :] if best is None or path.name != best.name]
        for path in self.folder.glob(f"{DAMAGED}step_*"):
            name = _STEP.fullmatch(path.name.removeprefix(DAMAGED))
            if name and int(name.group(1)) <= step_of(newest[0]):
                outdated.append(path)  # its step has been done again
        for path in outdated:
            with suppress(OSError):  # what cannot be removed now is tried again after the next save
                remove(path)


def name_of(step: int) -> str:
    """The folder's name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The number of steps after a checkpoint, read from its name."""
    match = _STEP.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not a checkpoint"
    return int(match.group(1))
