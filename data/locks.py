"""Can processes shut each other out here? Locks of the operating system on files, where the file system has them.

Such a lock is free again when its process is gone, however it went. Some network file systems have none (Lustre without
`flock`, NFS without its lock service). A lock that is a file of its own would stay behind a killed process for good, so
nothing stands in for it: who asks is told, and says so.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from screen import visible

NO_LOCKS = tuple(getattr(errno, name) for name in ("ENOSYS", "ENOLCK", "EOPNOTSUPP", "ENOTSUP") if hasattr(errno, name))


def lock_at(path: Path) -> FileLock | None:
    """The lock of a name, not yet taken; None where the file system has no locks.

    Raises:
        OSError: the folder cannot be written.
    """
    return FileLock(path, thread_local=False) if _has_locks(path) else None


@contextmanager
def held(path: Path, waiting: str) -> Iterator[None]:
    """Hold the lock of a name, where there are locks; where another process holds it, say so and wait.

    Args:
        waiting: what is said then, on standard error.
    Raises:
        OSError: the folder cannot be written.
    """
    lock = lock_at(path)
    if lock is None:
        yield
        return
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(visible(waiting), file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _has_locks(path: Path) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows has its own, everywhere
        return True
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # a link makes no file elsewhere
    try:
        fcntl.flock(handle, fcntl.LOCK_UN)  # takes nothing, so that it is in nobody's way
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    finally:
        os.close(handle)
    return True
