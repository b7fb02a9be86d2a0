"""What can be a home of weights? A file, or the RAM beside a device.

A home is a row of bytes, of which pieces are brought to a slot, and taken from one, by a thread of its own while something
else computes. From a file a piece goes straight into a slot on the host; to a device it goes by way of one buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from devices.copies import Carrier
from devices.machine_file import RUN_WAY, keep_disk
from engine.homes.files import NamelessFile, aligned_buffer
from units import GIB

TELLING_BYTES = GIB  # both ways, before what they took says how fast a disk is


class Home(ABC):
    """Bytes at rest. Each call returns when the bytes have arrived; one thread at a time."""

    @abstractmethod
    def bring(self, first: int, slot: Tensor) -> None:
        """Fill a slot (bytes, aligned) from place `first` on."""

    @abstractmethod
    def take(self, first: int, slot: Tensor) -> None:
        """Keep what is in a slot at place `first`."""

    def close(self) -> None:
        """Give everything back."""
        return None


class FileHome(Home):
    """A file that goes with its process. Memory: on a device, a buffer on the host as large as the largest piece.

    Args:
        folder: on whose disk. size: bytes. largest: piece. carrier: to the device; None: slots lie on the host.
    """

    def __init__(self, folder: Path, size: int, largest: int, carrier: Carrier | None) -> None:
        self._folder, self._file, self._carrier = folder, NamelessFile(folder, size), carrier
        self._buffer = None if carrier is None else aligned_buffer(largest, carrier.host_bytes)

    def bring(self, first: int, slot: Tensor) -> None:
        if self._carrier is None or self._buffer is None:
            return self._file.read(first, slot)
        self._file.read(first, self._buffer[: len(slot)])
        self._carrier.copy(slot, self._buffer[: len(slot)])

    def take(self, first: int, slot: Tensor) -> None:
        if self._carrier is None or self._buffer is None:
            return self._file.write(first, slot)
        self._carrier.copy(self._buffer[: len(slot)], slot)
        self._file.write(first, self._buffer[: len(slot)])

    def close(self) -> None:
        """Give the file back, and keep how fast the disk was beside the computation: the next plan tells its time by that."""
        self._file.close()
        read, written = self._file.was_read, self._file.was_written
        if min(read.bytes, written.bytes) >= TELLING_BYTES and self._file.passes_by_cache:
            with suppress(
                OSError, RuntimeError
            ):  # no home of the user, no folder any more: the next run measures again
                keep_disk(self._folder, read.rate, written.rate, RUN_WAY)


class RamHome(Home):
    """The RAM beside a device, pinned where that makes copies faster. Memory: all of it, in pieces.

    Args:
        pieces: first place and bytes of each, in order. carrier: to the device.
    """

    def __init__(self, pieces: Sequence[tuple[int, int]], carrier: Carrier) -> None:
        self._carrier, self._starts = carrier, [first for first, _ in pieces]
        self._pieces = [carrier.host_bytes(size) for _, size in pieces]

    def bring(self, first: int, slot: Tensor) -> None:
        self._carrier.copy(slot, self._at(first, len(slot)))

    def take(self, first: int, slot: Tensor) -> None:
        self._carrier.copy(self._at(first, len(slot)), slot)

    def _at(self, first: int, size: int) -> Tensor:
        number = bisect_right(self._starts, first) - 1
        start = first - self._starts[number]
        return self._pieces[number][start : start + size]

    def close(self) -> None:
        self._pieces.clear()
