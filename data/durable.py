"""When is a file on the disk, and not only in the system's memory?

A rename may reach the disk before the bytes of what is renamed: after a loss of power the name is there and the content is
not. So the content is waited for first, then the rename, then the folder that holds the name.

Source: T. S. Pillai et al. 2014, "All File Systems Are Not Created Equal" (OSDI), section 3.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from settings.fields import UserError, reason_of

_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


@contextmanager
def writing(flag: str, folder: str | Path) -> Iterator[None]:
    """Turn a disk that cannot be written into a sentence for the user, who has named the folder by a flag."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--{flag} = {folder}, cannot be written: {reason_of(error)}; free space or name another folder"
        ) from error


def put_in_place(fresh: Path, final: Path) -> None:
    """Rename a file or a folder, once all of it is on the disk; `final` is the old one or the new one, never a part.

    Raises:
        OSError: it cannot be written.
    """
    sync(fresh)
    os.replace(fresh, final)
    sync_folder(final.parent)


def sync(path: Path) -> None:
    """Wait until a file, or all below a folder, is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    if not path.is_dir():
        return _sync_file(path)
    for base, _, files in os.walk(path):
        for name in files:
            _sync_file(Path(base) / name)
        sync_folder(Path(base))


def is_full(error: BaseException) -> bool:
    """Whether a failure to write means that the disk, or what one may use of it, is full.

    numpy and some libraries tell no number: numpy says how much of an array it has written.
    """
    text = str(error)
    told = "No space left" in text or (" requested and " in text and text.endswith(" written"))
    return isinstance(error, OSError) and (error.errno in _FULL or told)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk.

    Raises:
        OSError: it cannot be written.
    """
    if os.name != "nt":  # Windows cannot open folders
        _sync(folder, os.O_RDONLY)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it where they are missing, each with its name on the disk.

    Raises:
        OSError: it cannot be made.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def _sync_file(path: Path) -> None:
    _sync(path, os.O_RDWR)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
