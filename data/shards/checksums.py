"""Is a token shard still what `prepare` has written?

Its CRC-32 is taken of the bytes on their way to the file, and is in the manifest. A run checks it once, before its
first row: a flipped bit in a token would be learnt and never be seen. The files are read in pieces of 1 MiB, whose pages
are the system's; what was checked is not read again by this process while size and time of change stay.

CRC-32 finds damage, not intent: whoever can write the shard can write the manifest.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from data.prepare.pace import Pace
from language import say
from settings.errors import UserError

PIECE_BYTES = 1024**2
_sound: set[tuple[str, int, int]] = set()  # path, size and time of change of files that were checked


@dataclass(frozen=True)
class ShardFile:
    """One file of shards as its manifest lists it; `crc32` is None where an earlier version has written it."""

    path: Path
    rows: int
    crc32: int | None


class SummedFile(io.BufferedWriter):
    """A new file that knows the checksum of what was written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"), PIECE_BYTES)
        self.crc32 = 0

    def write(self, data: object) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self.crc32 = zlib.crc32(view, self.crc32)
        return super().write(view)


def check_sums(files: Sequence[ShardFile], remedy: str, forget_pages: bool = False) -> None:
    """Read files once and compare their checksums; those that were checked, or have none, are passed over.

    Args:
        remedy: what to do about a damaged one, the end of the message.
        forget_pages: tell the system that it need not keep what was read.
    Raises:
        UserError: names all damaged files. OSError: one cannot be read.
    Memory: 1 MiB.
    """
    problems = []
    with closing(Pace(say("checking shards"))) as pace:
        for file in files:
            state = file.path.stat()
            seen = str(file.path), state.st_size, state.st_mtime_ns
            if file.crc32 is None or seen in _sound:
                continue
            found = _crc32_of(file.path, pace, forget_pages)
            pace.add(file.rows, 0, file.path.name)
            if found == file.crc32:
                _sound.add(seen)
            else:
                problems.append(
                    f"{file.path}: is damaged, its checksum is {found:08x} and was {file.crc32:08x} when it was written; {remedy}"
                )
    if problems:
        raise UserError(*problems)


def _crc32_of(path: Path, pace: Pace, forget_pages: bool) -> int:
    crc32, piece = 0, memoryview(bytearray(PIECE_BYTES))
    with io.FileIO(path) as file:
        while size := file.readinto(piece):
            crc32 = zlib.crc32(piece[:size], crc32)
            pace.add(0, size, path.name)
        if forget_pages and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return crc32
