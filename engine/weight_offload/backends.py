"""Where offloaded weights are stored: in an unlinked file on a disk, or in the RAM beside a device.

The file has no name, or on Windows is removed when it is closed, so that the system frees it however the process ends,
and nobody can take what is updated in place for a checkpoint. Its whole size is taken from the disk at once: a disk
that is too small is noticed before the first step. Reads and writes bypass the system's cache (O_DIRECT; F_NOCACHE on
macOS), so that neither cached nor dirty pages count against a limit; where the file system cannot, what was read is
dropped from the cache, and what was written is waited for and dropped.
Source: open(2), O_DIRECT; posix_fadvise(2).
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from devices.copies import Carrier
from devices.machine_file import keep_disk
from support.units import GIB

ALIGNMENT = 4096  # O_DIRECT asks for it of offsets in the file, of lengths and of memory.
TELLING_BYTES = GIB  # So many bytes, both ways, say how fast a disk is.


def aligned(size: int) -> int:
    """Bytes, rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def aligned_buffer(size: int, carrier: Carrier | None = None) -> Tensor:
    """Bytes on the host at an aligned address, of memory that copies of `carrier` are fast from. Memory: `size`, and
    two alignments.
    """
    count = aligned(size) + ALIGNMENT
    raw = torch.empty(count, dtype=torch.uint8) if carrier is None else carrier.host_bytes(count)
    first = -raw.data_ptr() % ALIGNMENT
    return raw[first : first + aligned(size)]


class OffloadBackend(ABC):
    """Stored weights of blocks, by their number. Each call returns when the bytes have arrived; one thread at a
    time.
    """

    @abstractmethod
    def load(self, block: int, buffer: Tensor) -> None:
        """Fill a buffer (bytes, aligned, as many as the block has)."""

    @abstractmethod
    def store(self, block: int, buffer: Tensor) -> None:
        """Keep what is in a buffer."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class CpuBackend(OffloadBackend):
    """The RAM beside a device, pinned where that makes copies faster. Memory: all of it.

    Args:
        sizes: bytes of each block. carrier: to the device.
    """

    def __init__(self, sizes: Sequence[int], carrier: Carrier) -> None:
        self._carrier = carrier
        self._blocks = [carrier.host_bytes(size) for size in sizes]

    def load(self, block: int, buffer: Tensor) -> None:
        self._carrier.copy(buffer, self._blocks[block])

    def store(self, block: int, buffer: Tensor) -> None:
        self._carrier.copy(self._blocks[block], buffer)

    def close(self) -> None:
        self._blocks.clear()


@dataclass
class Traffic:
    """What was moved one way: bytes, and the seconds that it took."""

    bytes: int = 0
    seconds: float = 0.0

    @contextmanager
    def count(self, size: int) -> Iterator[None]:
        """Count a move of so many bytes, which ends with the context."""
        began = time.perf_counter()
        yield
        self.bytes += size
        self.seconds += time.perf_counter() - began

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / max(self.seconds, 1e-9)


class DiskBackend(OffloadBackend):
    """A file that goes with its process.

    Args:
        folder: on whose disk. sizes: bytes of each block, aligned.
        carrier: to the device that buffers lie on; None: they lie on the host.
    Raises:
        OSError: the folder cannot be written, or the disk is too small.
    Memory: with a carrier, a buffer on the host as large as the largest block.
    """

    def __init__(self, folder: Path, sizes: Sequence[int], carrier: Carrier | None = None) -> None:
        self._folder = folder
        self._offsets = [0, *accumulate(sizes)]
        self._file = UnlinkedTempFile(folder, self._offsets[-1])
        self._reads = Traffic()
        self._writes = Traffic()
        self._carrier = carrier
        self._host_buffer = None if carrier is None else aligned_buffer(max(sizes), carrier)

    def load(self, block: int, buffer: Tensor) -> None:
        on_host = self._on_host(buffer)
        with self._reads.count(len(buffer)):
            self._file.read(self._offsets[block], on_host)
        if self._carrier is not None:
            self._carrier.copy(buffer, on_host)

    def store(self, block: int, buffer: Tensor) -> None:
        on_host = self._on_host(buffer)
        if self._carrier is not None:
            self._carrier.copy(on_host, buffer)
        with self._writes.count(len(buffer)):
            self._file.write(self._offsets[block], on_host)

    def _on_host(self, buffer: Tensor) -> Tensor:
        return buffer if self._host_buffer is None else self._host_buffer[: len(buffer)]

    def close(self) -> None:
        """Give the file back, and keep how fast the disk was beside the computation: the next plan predicts its time by
        that.
        """
        self._file.close()
        if min(self._reads.bytes, self._writes.bytes) >= TELLING_BYTES and self._file.bypasses_cache:
            # Without a home of the user, or once the folder is gone, the next run measures again.
            with suppress(OSError, RuntimeError):
                keep_disk(self._folder, self._reads.rate, self._writes.rate)


class UnlinkedTempFile:
    """A file of a fixed size that goes with its process.

    Args:
        folder: on whose disk it lies; it must be there. size: bytes, taken at once.
    Raises:
        OSError: the folder cannot be written, or the disk is too small; of reads and writes: the disk failed.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._file = tempfile.TemporaryFile(buffering=0, prefix=".weights-", dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)  # It is closed also where nobody closes it.
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, aligned(size))
            else:
                os.truncate(self._file.fileno(), aligned(size))
            self._is_direct = self._bypass_cache()
        except BaseException:
            self.close()
            raise

    @property
    def bypasses_cache(self) -> bool:
        """Whether what is read comes from the disk, and not out of the system's cache."""
        return self._is_direct or hasattr(os, "posix_fadvise")

    def read(self, offset: int, target: Tensor) -> None:
        """Fill `target` (aligned bytes on the host)."""
        missing = memoryview(target.numpy().data)
        self._file.seek(offset)
        while missing:
            count = self._file.readinto(missing)
            if not count:
                raise OSError(errno.EIO, "the file of weights ended early")
            missing = missing[count:]
        self._drop(offset, len(target))

    def write(self, offset: int, source: Tensor) -> None:
        """Write `source` (aligned bytes on the host)."""
        unwritten = memoryview(source.numpy().data)
        self._file.seek(offset)
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) or 0 :]
        if not self._is_direct:
            os.fsync(self._file.fileno())  # Pages that wait to be written cannot be dropped.
        self._drop(offset, len(source))

    def close(self) -> None:
        """Give its space on the disk back."""
        self._file.close()

    def _drop(self, offset: int, count: int) -> None:
        if not self._is_direct and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._file.fileno(), offset, count, os.POSIX_FADV_DONTNEED)

    def _bypass_cache(self) -> bool:
        """Ask the system to keep no pages of the file; False where it cannot. Some file systems agree and then
        refuse.
        """
        try:
            import fcntl
        except ImportError:  # Windows has no such calls.
            return False
        with suppress(OSError):
            if hasattr(fcntl, "F_NOCACHE"):
                fcntl.fcntl(self._file, fcntl.F_NOCACHE, 1)
                return True
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
            try:
                self._file.write(aligned_buffer(ALIGNMENT).zero_().numpy().data)
                return True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
        return False
