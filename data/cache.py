"""How is something costly made once, by one process, and never found half made?

The maker works in a neighbouring `.partial` place that is renamed into place at the end; a file lock lets processes
that start together wait for the first. A killed maker leaves only a `.partial` place, which the next one clears away, or
continues where the work can be resumed. So does one that has found the disk full, or a file that could not be read: what it
has made so far stays.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from data.durable import is_full, put_in_place
from data.locks import held
from settings.fields import DoesNotFit, UserError, reason_of


class Once(Protocol):
    """`make_once`, or `only_if_made` in its place."""

    def __call__(self, target: Path, make: Callable[[Path], None], resumable: bool = False) -> Path:
        """Give `target`, made or found."""


def make_once(target: Path, make: Callable[[Path], None], resumable: bool = False) -> Path:
    """Make the file or folder `target` unless it is there.

    Args:
        target: final place; that it exists means that it is complete.
        make: called with an unused path beside `target`, which it must fill with a file or a folder.
        resumable: `make` can continue with what an interrupted attempt left at that path.
    Returns:
        `target`.
    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"another process is making {target}: waiting until it is done"
        with held(target.with_name(target.name + ".lock"), waiting):
            if not target.exists():
                _make(target, make, resumable)
    except OSError as error:
        raise UserError(_explain(target, error, resumable)) from error
    return target


class NotMade(Exception):
    """Something is not there yet, and making it was not asked for."""


def only_if_made(target: Path, make: Callable[[Path], None], resumable: bool = False) -> Path:
    """Stand in for `make_once` where nothing shall be made.

    Raises:
        NotMade: `target` is not there.
    """
    if not target.exists():
        raise NotMade(str(target))
    return target


def _make(target: Path, make: Callable[[Path], None], resumable: bool) -> None:
    partial = _partial(target)
    if not resumable:
        remove(partial)
    try:
        make(partial)
        put_in_place(partial, target)
    except BaseException as error:
        if not (resumable and _may_pass(error)):
            remove(partial)
        raise


def _may_pass(error: BaseException) -> bool:
    """Whether the same work may get further from where it stopped: it was interrupted, memory or disk were short, or a read or a
    write has failed, which of a network it does now and then. What is wrong with the data or with the place stays wrong.
    """
    causes = (error, error.__cause__, error.__context__)
    return isinstance(error, (KeyboardInterrupt, DoesNotFit)) or any(isinstance(cause, OSError) for cause in causes)


def remove(path: Path) -> None:
    """Remove a file or a folder, or nothing if it is not there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def _explain(target: Path, error: OSError, resumable: bool) -> str:
    if is_full(error):
        kept = _partial(target)
        if resumable and kept.exists():
            return (
                f"{target.parent}: the disk is full; what is done is kept in {kept}: free space and run the same command "
                "again, it continues from there; or delete that folder and name another with --cache_dir or --shards_dir"
            )
        return f"{target.parent}: the disk is full; free space or name another folder with --cache_dir or --shards_dir"
    reason = "it is a file" if isinstance(error, FileExistsError) else reason_of(error)
    return f"{target.parent}: cannot be written ({reason}); name another folder with --cache_dir or --shards_dir"


def fingerprint(value: Any) -> str:
    """Hash a JSON-able value to 16 hex digits; equal values give equal digits on every machine."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:16]
