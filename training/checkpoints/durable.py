"""How does a file or a folder get its name only once it is whole and on the disk?

It is written under a hidden name, flushed, and renamed; the folder that holds it is flushed as well, so that the rename
itself outlasts a power cut. A name that somebody has made a link is replaced, never written through.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from data.durable import sync, sync_folder

TEMPORARY = ".tmp-"


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a small file beside its place, and put it there at once.

    Args:
        write: fills the path it is given, which is unused.
    Raises:
        OSError: it cannot be written; the file of before is whole.
    """
    fresh = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        fresh.unlink(missing_ok=True)
        write(fresh)
        sync(fresh)
        os.replace(fresh, path)
        fresh.unlink(missing_ok=True)  # renaming a hard link onto the very same file leaves both
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """The same with a text; raises as `replace_file`."""
    replace_file(path, lambda fresh: fresh.write_text(text, encoding="utf8"))


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, or nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
