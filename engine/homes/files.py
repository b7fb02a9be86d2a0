"""How does a file hold weights without taking memory, and without being left behind?

It has no name: it is unlinked as soon as it is open, so that the system frees it however the process ends, and nobody can
take what is updated in place for a checkpoint. Its whole size is taken from the disk at once: a disk that is too small is
noticed before the first step. Reads and writes pass by the system's cache (O_DIRECT; F_NOCACHE on macOS), so that neither
cached nor dirty pages count against a limit; where the file system cannot, what was read is dropped from the cache, and
what was written is waited for and dropped. Whoever reads or writes waits for it; one thread at a time.
Source: open(2), O_DIRECT; posix_fadvise(2).
"""

from __future__ import annotations

import errno
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 4096  # of places in the file, of lengths and of memory: what O_DIRECT asks for
MOST_AT_ONCE = 1 << 30  # bytes of one call to the system, which takes no more than 2^31


def aligned(size: int) -> int:
    """Bytes, rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def bytes_of(size: int) -> Tensor:
    """Bytes (uint8) on the host."""
    return torch.empty(size, dtype=torch.uint8)


def aligned_buffer(size: int, make: Callable[[int], Tensor] = bytes_of) -> Tensor:
    """Bytes on the host at an aligned address, of memory that `make` gives. Memory: `size`, and two alignments."""
    raw = make(aligned(size) + ALIGNMENT)
    first = -raw.data_ptr() % ALIGNMENT
    return raw[first : first + aligned(size)]


@dataclass
class Moved:
    """What has gone one way: bytes, and the seconds that it took."""

    bytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / max(self.seconds, 1e-9)

    @contextmanager
    def counting(self, size: int) -> Iterator[None]:
        """So many bytes go while the context lasts."""
        began = time.perf_counter()
        yield
        self.bytes, self.seconds = self.bytes + size, self.seconds + time.perf_counter() - began


class NamelessFile:
    """A file of a fixed size that goes with its process.

    Args:
        folder: on whose disk it lies; it must be there. size: bytes, taken at once.
    Raises:
        OSError: the folder cannot be written, or the disk is too small.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = aligned(size)
        self.was_read, self.was_written = Moved(), Moved()
        flags = getattr(os, "O_TEMPORARY", 0) | getattr(os, "O_BINARY", 0)  # Windows removes it when it is closed
        path = folder / f".weights-{uuid.uuid4().hex}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
        self._file = os.fdopen(handle, "r+b", buffering=0)
        weakref.finalize(self, self._file.close)  # where nobody closes it
        try:
            if os.name != "nt":
                path.unlink()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, self.size)
            else:
                os.truncate(handle, self.size)
            self.is_direct = _passes_by_cache(handle) and self._tries_direct()
        except BaseException:
            self.close()
            raise

    def read(self, first: int, target: Tensor) -> None:
        """Fill `target` (aligned bytes on the host) from place `first` on.

        Raises:
            OSError: the disk failed.
        """
        with self.was_read.counting(len(target)):
            for start, part in _parts(target):
                self._read_part(first + start, memoryview(part.numpy().data))
        if not self.is_direct:
            self._drop(first, len(target))

    def write(self, first: int, source: Tensor) -> None:
        """Write `source` (aligned bytes on the host) to place `first`.

        Raises:
            OSError: the disk failed.
        """
        with self.was_written.counting(len(source)):
            for start, part in _parts(source):
                self._write_part(first + start, memoryview(part.numpy().data))
        if not self.is_direct:
            self._drop(first, len(source))

    def _read_part(self, first: int, view: memoryview) -> None:
        self._file.seek(first)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                raise OSError(errno.EIO, "the file of weights ended early")
            done += count

    def _write_part(self, first: int, view: memoryview) -> None:
        self._file.seek(first)
        done = 0
        while done < len(view):
            done += self._file.write(view[done:]) or 0
        if not self.is_direct:
            os.fsync(self._file.fileno())  # pages that wait to be written cannot be dropped

    @property
    def passes_by_cache(self) -> bool:
        """Whether what is read comes from the disk, and not out of the system's cache."""
        return self.is_direct or hasattr(os, "posix_fadvise")

    def close(self) -> None:
        """Give its room on the disk back."""
        self._file.close()

    def _tries_direct(self) -> bool:
        """Whether the file system really passes by its cache; some say so and then refuse."""
        try:
            self._file.seek(0)
            self._file.write(aligned_buffer(ALIGNMENT).zero_().numpy().data)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            import fcntl

            handle = self._file.fileno()
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0))
            return False
        return True

    def _drop(self, first: int, count: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._file.fileno(), first, count, os.POSIX_FADV_DONTNEED)


def _parts(tensor: Tensor) -> list[tuple[int, Tensor]]:
    return [(start, tensor[start : start + MOST_AT_ONCE]) for start in range(0, len(tensor), MOST_AT_ONCE)]


def _passes_by_cache(handle: int) -> bool:
    """Ask the system to keep no pages of a file; False where it has no word for that."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
            return True
        return False
    if hasattr(fcntl, "F_NOCACHE"):
        with suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_NOCACHE, 1)
            return True
    return False
