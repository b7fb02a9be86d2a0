"""How much of a file that somebody else has written is taken into memory at once? No more than such a file can have.

A folder may come from anybody: its `config.json` may be a file of terabytes that takes no room where it lies (a sparse one), a
device without an end, or a pipe that nobody writes to. So whatever is read whole is a plain file, and its size is known before.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 16 * 1024**2  # of configurations, states and the like: a table in memory takes some twenty times as much
PIECE_BYTES = 1024**2  # that are read at a time where a file does not say how many it has
MOST_TABLE_BYTES = 256 * 1024**2  # of tokenizers, and of tables that grow with what they describe


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8.

    Raises:
        OSError: it is none, cannot be read, or is larger than `most` bytes. UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, most).decode("utf8").replace("\r\n", "\n")


def opened(path: str | Path) -> BinaryIO:
    """A plain file to read; a pipe that nobody writes to would be waited for.

    Raises:
        OSError: it is none, or cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "is no plain file")
    return open(path, "rb")


def read_bytes(path: str | Path, most: int = MOST_BYTES, may_wait: bool = False) -> bytes:
    """The bytes of a file; raises OSError as `read_text`.

    Args:
        may_wait: whether it may be a pipe, as a shell gives one for `<(...)`: the user has named it.
    """
    pieces, left = list[bytes](), most + 1
    with open(path, "rb") if may_wait else opened(path) as file:
        # no more at once than the file has: Python asks malloc for all that a read allows, which `ulimit -v` may refuse
        step = max(PIECE_BYTES, os.fstat(file.fileno()).st_size + 1)
        while left and (piece := file.read(min(step, left))):
            pieces.append(piece)
            left -= len(piece)
    content = b"".join(pieces)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most // 1024**2} MiB, which no such file is")
    return content
