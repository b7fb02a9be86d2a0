"""The checkpoints of a run: one complete folder each, of which the newest and the best are kept.

A checkpoint is written to a temporary folder that is renamed when it is complete (`storage.atomic_folder`). Its
`checksums.json` has the checksum of every file and the step of the best checkpoint so far. The latest and the best are
therefore known from the folders alone; the links `latest` and `best` are for people and scripts.

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

from model.formats.checksums import CHECKSUMS_FILE, damages, read_sums, seal
from settings.errors import UserError, reason_of
from support.language import join, say
from support.storage import REPLACED, TEMPORARY, atomic_file, atomic_folder, clear_leftovers, remove, rename

DAMAGED = "damaged-"  # The prefix of a damaged checkpoint's new name.
MEAN = f"{TEMPORARY}mean"  # The mean of the last checkpoints, while it is evaluated (`training.averaging`).
BEST_STEP = "best_step"  # The key in checksums.json for the step of the best checkpoint when this one was written.
_STEP = re.compile(r"step_(\d{8,18})")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run_dir: the run's folder.
        keep_latest: how many of the newest are kept besides the best one, 1 or more.
    """

    def __init__(self, run_dir: str | Path, keep_latest: int) -> None:
        self.folder = Path(run_dir) / "checkpoints"
        self.keep_latest = keep_latest
        self._had_run_dir = self.folder.parent.is_dir()

    def save(self, step: int, write: Callable[[Path], None], is_best: bool = False) -> Path:
        """Write the checkpoint of one step, then remove those that are too old.

        Args:
            step: the number of steps done.
            write: writes the checkpoint's files into the empty folder that it gets.
            is_best: whether this is the best checkpoint so far.
        Returns:
            the checkpoint's folder.
        Raises:
            UserError: the disk is full or cannot be written; earlier checkpoints are unharmed.
        """
        run_dir = self.folder.parent
        final = self.folder / name_of(step)
        try:
            # Not created again: where a disk is no longer mounted, it would fill the disk below the mount point.
            if self._had_run_dir and not run_dir.is_dir():
                problem = say("{parent} is gone, as with a disk that is no longer mounted", parent=run_dir)
                raise OSError(errno.ENOENT, problem)
            self.clear_leftovers()
            with atomic_folder(final) as temporary:
                write(temporary)
                best = final if is_best else self.named_best()
                seal(temporary, **{BEST_STEP: None if best is None else step_of(best)})
            self._update_links()
        except OSError as error:
            last = self.latest()
            earlier: str = say("there is no earlier checkpoint")
            resume: str = ""
            if last is not None:
                earlier = say("the checkpoint of step {step_of} is whole", step_of=step_of(last))
                text = "; --is_keep_training=True --run_name={quote} continues from there"
                resume = say(text, quote=shlex.quote(run_dir.name))
            raise UserError(
                "--output_dir = {parent}, cannot be written at step {step}: {reason}; {kept}; free space or choose "
                "another --output_dir{resume}",
                parent=run_dir.parent,
                step=step,
                reason=reason_of(error),
                kept=earlier,
                resume=resume,
            ) from error
        self._remove_outdated()
        return final

    def latest(self) -> Path | None:
        """The newest checkpoint with no file missing or cut short; None if there is none."""
        return next(self._complete(), None)

    def last(self, count: int) -> list[Path]:
        """Those of the newest `count` checkpoints whose checksums are right, oldest first; at most `keep_latest`."""
        newest = self._all()[: min(count, self.keep_latest)]
        return [path for path in reversed(newest) if not self._damages(path)]

    def best(self) -> Path | None:
        """The checkpoint with the best evaluation, with no file missing or cut short; None if there is none."""
        best = self.named_best()
        return None if best is None or self._damages(best, deep=False) else best

    def named_best(self) -> Path | None:
        """The path of the checkpoint that the newest one names as the best; it may be damaged or missing by now.

        None before the first evaluation.
        """
        # A complete checkpoint knows it best. If none is, any whose checksums can be read will do.
        for path in [*self._complete(), *self._all()]:
            with suppress(UserError):  # The file of checksums may be damaged as well.
                sums = read_sums(path)
                if sums is not None:
                    step: Any = sums.get(BEST_STEP)
                    is_step = isinstance(step, int) and _STEP.fullmatch(name_of(step))
                    return self.folder / name_of(step) if is_step else None
        return None

    def intact(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose checksums are right, to resume from. Newer ones are renamed to damaged-*.

        Returns:
            the checkpoint, or None if there are none; and a warning for each damaged one.
        Raises:
            UserError: there are checkpoints, and all of them are damaged.
            OSError: the folder cannot be written.
        Time: that of reading the checkpoint once.
        """
        self.clear_leftovers()
        damaged: dict[Path, str] = {}
        for path in self._all():
            problems = self._damages(path)
            if problems:
                damaged[path] = join("; ", problems)
                continue
            for newer in damaged:
                new_path = newer.with_name(f"{DAMAGED}{newer.name}")
                with suppress(OSError):  # Under its old name it is not used either: its checksums are wrong.
                    remove(new_path)
                    rename(newer, new_path)
            if damaged:
                self._update_links()
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
        """Remove unfinished files and folders of a process that was killed; raises OSError."""
        for prefix in (REPLACED, TEMPORARY):
            for path in self.folder.glob(f"{prefix}*"):
                clear_leftovers(self.folder / path.name.removeprefix(prefix))

    def finish_last_save(self) -> None:
        """Update the links and remove old checkpoints, if a process was killed before it could; raises OSError."""
        if self._all():
            self._update_links()
            self._remove_outdated()

    def _all(self) -> list[Path]:
        """All checkpoints, newest first."""
        paths = [path for path in self.folder.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(paths, key=step_of, reverse=True)

    def _complete(self) -> Iterator[Path]:
        """Checkpoints with no file missing or cut short, newest first."""
        return (path for path in self._all() if not self._damages(path, deep=False))

    def _damages(self, path: Path, deep: bool = True) -> list[str]:
        """What is wrong with a checkpoint; `deep` compares checksums too, else only the lengths of files."""
        sums = path / CHECKSUMS_FILE
        if not sums.is_file():  # They are written last, so this is an incomplete copy.
            return [say("{sums} is missing: not all of the checkpoint is there", sums=sums)]
        return damages(path, deep)

    def _update_links(self) -> None:
        """Point the links `latest` and `best` to these checkpoints."""
        for name, target in (("latest", self.latest()), ("best", self.best())):
            if target is None:
                (self.folder / name).unlink(missing_ok=True)
                continue
            with atomic_file(self.folder / name) as pointer:
                try:
                    pointer.symlink_to(target.name, target_is_directory=True)
                except (OSError, NotImplementedError):
                    # Links are impossible on FAT, some network drives, and Windows without the right to make them.
                    pointer.write_text(f"{target.name}\n", encoding="utf8")

    def _remove_outdated(self) -> None:
        """Remove all but the newest and the best, and damaged ones whose steps have been done again."""
        best = self.named_best()
        checkpoints = self._all()
        outdated = [path for path in checkpoints[self.keep_latest :] if path != best]
        for path in self.folder.glob(f"{DAMAGED}step_*"):
            match = _STEP.fullmatch(path.name.removeprefix(DAMAGED))
            if match and int(match.group(1)) <= step_of(checkpoints[0]):
                outdated.append(path)
        for path in outdated:
            with suppress(OSError):  # It is tried again after the next save.
                remove(path)


def name_of(step: int) -> str:
    """The name of the folder for the checkpoint of a step."""
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from the name of its folder."""
    match = _STEP.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is not a checkpoint"
    return int(match.group(1))
