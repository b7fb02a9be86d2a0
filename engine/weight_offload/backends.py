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
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from common.units import GIB
from devices.copies import Carrier
from devices.machine_file import keep_disk

ALIGNMENT = 4096  # of offsets in the file, of lengths and of memory: what O_DIRECT asks for
MOST_AT_ONCE = 1 << 30  # bytes of one call to the system, which takes no more than 2^31
TELLING_BYTES = GIB  # both ways, before what they took says how fast a disk is


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

    def close(self) -> None:
        """Give everything back."""
        return None


class CpuBackend(OffloadBackend):
    """The RAM beside a device, pinned where that makes copies faster. Memory: all of it.

    Args:
        sizes: bytes of each block. carrier: to the device.
    """

    def __init__(self, sizes: Sequence[int], carrier: Carrier) -> None:
        self._carrier, self._blocks = carrier, [carrier.host_bytes(size) for size in sizes]

    def load(self, block: int, buffer: Tensor) -> None:
        self._carrier.copy(buffer, self._blocks[block])

    def store(self, block: int, buffer: Tensor) -> None:
        self._carrier.copy(self._blocks[block], buffer)

    def close(self) -> None:
        self._blocks.clear()


class DiskBackend(OffloadBackend):
    """A file that goes with its process; buffers lie on the host.

    Args:
        folder: on whose disk. sizes: bytes of each block, aligned.
    Raises:
        OSError: the folder cannot be written, or the disk is too small.
    """

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self._folder = folder
        self._offsets = [0, *accumulate(sizes)]
        self._file = UnlinkedTempFile(folder, self._offsets[-1])
        self._read = [0.0, 0.0]  # Bytes, and the seconds that they took.
        self._written = [0.0, 0.0]

    def load(self, block: int, buffer: Tensor) -> None:
        self._timed(self._file.read, block, buffer, self._read)

    def store(self, block: int, buffer: Tensor) -> None:
        self._timed(self._file.write, block, buffer, self._written)

    def _timed(self, move: Callable[[int, Tensor], None], block: int, buffer: Tensor, total: list[float]) -> None:
        began = time.perf_counter()
        move(self._offsets[block], buffer)
        total[0], total[1] = total[0] + len(buffer), total[1] + time.perf_counter() - began

    def close(self) -> None:
        """Give the file back, and keep how fast the disk was beside the computation: the next plan predicts its time by
        that.
        """
        self._file.close()
        if min(self._read[0], self._written[0]) >= TELLING_BYTES and self._file.bypasses_cache:
            read, written = (size / max(seconds, 1e-9) for size, seconds in (self._read, self._written))
            # No home of the user, no folder any more: the next run measures again.
            with suppress(OSError, RuntimeError):
                keep_disk(self._folder, read, written)


class StagedDiskBackend(DiskBackend):
    """The same for buffers on a device. Memory: a buffer on the host as large as the largest block.

    Args:
        carrier: to the device.
    """

    def __init__(self, folder: Path, sizes: Sequence[int], carrier: Carrier) -> None:
        super().__init__(folder, sizes)
        self._carrier = carrier
        self._buffer = aligned_buffer(max(sizes), carrier)

    def load(self, block: int, buffer: Tensor) -> None:
        on_host = self._buffer[: len(buffer)]
        super().load(block, on_host)
        self._carrier.copy(buffer, on_host)

    def store(self, block: int, buffer: Tensor) -> None:
        on_host = self._buffer[: len(buffer)]
        self._carrier.copy(on_host, buffer)
        super().store(block, on_host)


class UnlinkedTempFile:
    """A file of a fixed size that goes with its process.

    Args:
        folder: on whose disk it lies; it must be there. size: bytes, taken at once.
    Raises:
        OSError: the folder cannot be written, or the disk is too small; of reads and writes: the disk failed.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._file = tempfile.TemporaryFile(buffering=0, prefix=".weights-", dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)  # where nobody closes it
        handle = self._file.fileno()
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, aligned(size))
            else:
                os.truncate(handle, aligned(size))
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
        view, done = memoryview(target.numpy().data), 0
        self._file.seek(offset)
        while done < len(view):
            count = self._file.readinto(view[done : done + MOST_AT_ONCE])
            if not count:
                raise OSError(errno.EIO, "the file of weights ended early")
            done += count
        self._drop(offset, len(view))

    def write(self, offset: int, source: Tensor) -> None:
        """Write `source` (aligned bytes on the host)."""
        view, done = memoryview(source.numpy().data), 0
        self._file.seek(offset)
        while done < len(view):
            done += self._file.write(view[done : done + MOST_AT_ONCE]) or 0
        if not self._is_direct:
            os.fsync(self._file.fileno())  # pages that wait to be written cannot be dropped
        self._drop(offset, len(view))

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
        except ImportError:  # Windows
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
