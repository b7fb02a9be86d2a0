"""How does a checkpoint survive whatever happens while it is written?

It is written into a hidden folder, flushed to the disk, and renamed: a folder called `step_*` is always whole. Then
`latest` (and `best`) are switched, and old ones go, again by a rename first. Whatever a kill leaves behind is hidden
and cleared by the next save.

    <output_dir>/<run_name>/run.json          see `training/runs.py`
    <output_dir>/<run_name>/checkpoints/step_00000050/   a whole model folder, and state/ for resuming
    <output_dir>/<run_name>/checkpoints/latest, best     links; where links are impossible, small text files
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from settings import UserError

TEMPORARY, REPLACED = ".tmp-", ".replaced-"
_STEP = re.compile(r"step_(\d+)")
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

    def save(self, step: int, write: Callable[[Path], None], is_best: bool = False) -> Path:
        """Write the checkpoint of one step, then drop those that are too old.

        Args:
            step: the steps done.
            write: fills the empty folder it is given.
            is_best: whether `best` shall name this one.
        Returns:
            the checkpoint's folder.
        Raises:
            UserError: the disk is full or cannot be written; the checkpoints before this one are whole.
        """
        final = self.folder / f"step_{step:08d}"
        if not self._is_main:
            return final
        temporary = self.folder / f"{TEMPORARY}{final.name}"
        try:
            self._clear_leftovers()
            temporary.mkdir(parents=True)
            write(temporary)
            _flush(temporary)
            self._put_in_place(temporary, final)
            for name in ["latest", "best"] if is_best else ["latest"]:
                point(self.folder / name, final)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if _is_write_failure(error):
                raise self._failure(step, error) from error
            raise
        self._rotate()
        return final

    def latest(self) -> Path | None:
        """The newest checkpoint; None before the first."""
        return resolve(self.folder / "latest") or next(iter(self._all()), None)

    def best(self) -> Path | None:
        """The checkpoint with the lowest evaluation loss; None before the first evaluation."""
        return resolve(self.folder / "best")

    def _all(self) -> list[Path]:
        """Whole checkpoints, newest first."""
        found = [path for path in self.folder.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=step_of, reverse=True)

    def _clear_leftovers(self) -> None:
        for path in self.folder.glob(f"{REPLACED}*"):
            original = self.folder / path.name.removeprefix(REPLACED)
            if not original.exists():  # killed between the two renames of a replacement
                os.replace(path, original)
        for pattern in (TEMPORARY, REPLACED):
            for path in self.folder.glob(f"{pattern}*"):
                _remove(path)

    def _put_in_place(self, temporary: Path, final: Path) -> None:
        aside = self.folder / f"{REPLACED}{final.name}"
        if final.exists():
            os.replace(final, aside)
        os.replace(temporary, final)
        _flush_folder(self.folder)
        if aside.exists():
            _remove(aside)

    def _rotate(self) -> None:
        best = self.best()
        for path in self._all()[self.keep_latest :]:
            if best is None or path.name != best.name:
                going = self.folder / f"{TEMPORARY}{path.name}"
                with suppress(OSError):  # what cannot be removed now is tried again after the next save
                    os.replace(path, going)
                    _remove(going)

    def _failure(self, step: int, error: BaseException) -> UserError:
        last = self.latest()
        kept = f"the checkpoint of step {step_of(last)} is whole" if last else "there is no earlier checkpoint"
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        advice = "free space or name another --output_dir" + (
            "; --is_keep_training=True goes on from there" if last else ""
        )
        place = f"--output_dir = {self.folder.parent.parent}"
        return UserError(f"{place}, cannot be written at step {step}: {reason}; {kept}; {advice}")


def step_of(checkpoint: Path) -> int:
    """The number of steps behind a checkpoint, read from its name."""
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


def _flush(folder: Path) -> None:
    """Wait until all files below a folder are on the disk, so that the rename cannot overtake them."""
    for base, _, files in os.walk(folder):
        for name in files:
            handle = os.open(os.path.join(base, name), os.O_RDWR)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        _flush_folder(Path(base))


def _flush_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # Windows cannot open folders
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_write_failure(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, OSError) or (
        isinstance(error, Exception) and any(sign in text for sign in _WRITE_FAILURES)
    )
