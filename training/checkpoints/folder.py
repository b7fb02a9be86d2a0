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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.language import join, say
from common.storage import REPLACED, TEMPORARY, atomic_file, atomic_folder, clear_leftovers, remove, rename
from model.formats.checksums import CHECKSUMS_FILE, damages, read_sums, seal
from settings.errors import UserError, reason_of

DAMAGED = "damaged-"
MEAN = f"{TEMPORARY}mean"  # The mean of the last checkpoints, while it is evaluated (`training.averaging`).
BEST_STEP = "best_step"  # The key in checksums.json for the step of the best checkpoint when this one was written.
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
        run_dir = self.folder.parent
        final = self.folder / name_of(step)
        try:
            if self._had_run_dir and not run_dir.is_dir():  # A new folder would lie below the mount point.
                problem = say("{parent} is gone, as with a disk that is no longer mounted", parent=run_dir)
                raise OSError(errno.ENOENT, problem)
            self.clear_leftovers()
            with atomic_folder(final) as temporary:
                write(temporary)
                best = final if is_best else self.named_best()
                seal(temporary, **{BEST_STEP: None if best is None else step_of(best)})
            self._point()
        except OSError as error:
            last = self.latest()
            saved: str = say("there is no earlier checkpoint")
            resume: str = ""
            if last is not None:
                saved = say("the checkpoint of step {step_of} is whole", step_of=step_of(last))
                text = "; --is_keep_training=True --run_name={quote} continues from there"
                resume = say(text, quote=shlex.quote(run_dir.name))
            raise UserError(
                "--output_dir = {parent}, cannot be written at step {step}: {reason}; {kept}; free space or choose "
                "another --output_dir{resume}",
                parent=run_dir.parent,
                step=step,
                reason=reason_of(error),
                kept=saved,
                resume=resume,
            ) from error
        self._rotate()
        return final

    def latest(self) -> Path | None:
        """The newest checkpoint that has all its files, in full length; None before the first."""
        return next(self._complete(), None)

    def last(self, count: int) -> list[Path]:
        """The last checkpoints, oldest first: so many, or as many as are kept, of which every byte is as it was
        written.
        """
        return [path for path in self._all()[: min(count, self.keep_latest)][::-1] if not self._damages(path)]

    def best(self) -> Path | None:
        """The checkpoint with the best evaluation, if it has all its files; None before the first evaluation."""
        best = self.named_best()
        return None if best is None or self._damages(best, deep=False) else best

    def named_best(self) -> Path | None:
        """The checkpoint with the best evaluation as the newest one knows it, whatever has become of its files
        since.
        """
        for path in [*self._complete(), *self._all()]:
            with suppress(UserError):  # Its sums may be damaged as well.
                sums = read_sums(path)
                if sums is not None:
                    step: Any = sums.get(BEST_STEP)
                    is_step = isinstance(step, int) and _STEP.fullmatch(name_of(step))
                    return self.folder / name_of(step) if is_step else None
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
            problems = self._damages(path)
            if problems:
                damaged[path] = join("; ", problems)
                continue
            for newer in damaged:
                aside = newer.with_name(f"{DAMAGED}{newer.name}")
                with suppress(OSError):  # Its sums keep it from being used as well.
                    remove(aside)
                    rename(newer, aside)
            if damaged:
                self._point()
            text = "{wrong}: continuing from step {step_of}"
            return path, [say(text, wrong=wrong, step_of=step_of(path)) for wrong in damaged.values()]
        if not damaged:
            return None, []
        text = "checkpoint = {path}, {wrong}; copy it again"
        raise UserError(
            *(say(text, path=path, wrong=wrong) for path, wrong in damaged.items()),
            say("--is_keep_training = True, no checkpoint is whole; start again with --overwrite=True"),
        )

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
        paths = [path for path in self.folder.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(paths, key=step_of, reverse=True)

    def _complete(self) -> Iterator[Path]:
        """Checkpoints that have all their files, in full length, newest first."""
        return (path for path in self._all() if not self._damages(path, deep=False))

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
                    # Windows without the right to make links has none, nor have FAT and some network drives.
                    pointer.write_text(f"{target.name}\n", encoding="utf8")

    def _rotate(self) -> None:
        best = self.named_best()
        newest = self._all()
        outdated = [path for path in newest[self.keep_latest :] if path != best]
        for path in self.folder.glob(f"{DAMAGED}step_*"):
            name = _STEP.fullmatch(path.name.removeprefix(DAMAGED))
            if name and int(name.group(1)) <= step_of(newest[0]):
                outdated.append(path)  # Its step has been done again.
        for path in outdated:
            with suppress(OSError):  # The next save tries again.
                remove(path)


def name_of(step: int) -> str:
    """The folder's name of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The number of steps after a checkpoint, read from its name."""
    match = _STEP.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not a checkpoint"
    return int(match.group(1))
