"""How do token rows reach their shards so that a killed preparing continues where it stopped?

Rows are appended to plain files first, the spool of the shard that is being filled. A full spool is written as an Arrow
shard beside it and renamed into place. Everything is append-only, so a state is a few file sizes: to go back to it, the
files are cut to them. What came after the last state that was saved is simply done again, with the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data.shards.store import COLUMNS, ROW_TOKENS, STREAM, id_dtype, write_shard
from settings.errors import UserError

Column = tuple[NDArray[np.int32], NDArray[np.int64]]  # ids of many rows end to end, and the length of each row


class Spool:
    """The rows of one split on their way to disk; a context, in which the files are open.

    Args:
        folder: the split's folder, made if it is not there.
        kind: "stream" or another key of `COLUMNS`.
        vocab_size: ids below 65,536 are stored in two bytes, others in four.
        shard_rows: rows of one shard file.
        state: what `state` returned at the point to continue from; None: a new split.
    Raises:
        UserError: on entering, the files are not those of that state.
    Memory:
        what `add` is given; 128 rows and 4 bytes a row and column while a shard is written.
    """

    def __init__(
        self, folder: Path, kind: str, vocab_size: int, shard_rows: int, state: dict[str, Any] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.kind, self.shard_rows = folder, kind, shard_rows
        self.dtype = id_dtype(vocab_size)
        self.shards: list[dict[str, Any]] = list(state["shards"]) if state else []
        self._names = [name for column in COLUMNS[kind] for name in (f"{column}.ids", f"{column}.lengths")]
        self._capacity = shard_rows * ROW_TOKENS if kind == STREAM else shard_rows
        self._filled = int(state["filled"]) if state else 0  # rows of the open shard; tokens of a stream
        self._files: list[BinaryIO] = []
        self._sizes = [int(size) for size in state["sizes"]] if state else [0] * len(self._names)

    def _path(self, shard: int, name: str) -> Path:
        return self.folder / f".{shard:05d}.{name}"

    def _open(self, sizes: Sequence[int]) -> None:
        shard = len(self.shards)
        for name, size in zip(self._names, sizes, strict=True):
            path = self._path(shard, name)
            path.touch()
            if path.stat().st_size < size:  # `truncate` would fill it up with zeros
                raise UserError(f"{path}: is shorter than it was; run the command again, it starts over")
            os.truncate(path, size)
            self._files.append(path.open("ab"))

    def add(self, columns: Sequence[Column]) -> None:
        """Append rows; of a stream, any number of tokens."""
        while True:
            rows = len(columns[0][0]) if self.kind == STREAM else len(columns[0][1])
            fits = min(rows, self._capacity - self._filled)
            self._append(columns if fits == rows else [self._cut(column, fits)[0] for column in columns])
            self._filled += fits
            if self._filled < self._capacity:
                return
            self._seal()
            columns = [self._cut(column, fits)[1] for column in columns]

    def _cut(self, column: Column, rows: int) -> tuple[Column, Column]:
        ids, lengths = column
        if self.kind == STREAM:
            return (ids[:rows], lengths), (ids[rows:], lengths)
        place = int(lengths[:rows].sum())
        return (ids[:place], lengths[:rows]), (ids[place:], lengths[rows:])

    def _append(self, columns: Sequence[Column]) -> None:
        for number, (ids, lengths) in enumerate(columns):
            ids.astype(self.dtype).tofile(self._files[2 * number])
            if self.kind != STREAM:
                lengths.astype(np.int32).tofile(self._files[2 * number + 1])

    def _seal(self) -> None:
        """Write the open spool as a shard and begin the next one."""
        self._close()
        number = len(self.shards)
        if self.kind == STREAM:
            whole, rest = divmod(self._filled, ROW_TOKENS)
            lengths = [np.array([ROW_TOKENS] * whole + [rest] * bool(rest), np.int64)]
        else:
            lengths = [np.fromfile(self._path(number, name), np.int32).astype(np.int64) for name in self._names[1::2]]
        name = f"{number:05d}.arrow"
        ids = [self._path(number, name) for name in self._names[::2]]
        crc32 = write_shard(self.folder / name, self.kind, self.dtype, ids, lengths)
        self.shards.append({"file": name, "rows": len(lengths[0]), "crc32": crc32})
        self._filled = 0
        self._open([0] * len(self._names))

    def finish(self) -> None:
        """Write the rows that are still held. The spools stay, so that the last saved state can still be gone back to."""
        if self._filled:
            self._seal()
        self._close()

    def state(self) -> dict[str, Any]:
        """Bring everything to disk and say how to come back to this point."""
        sizes = []
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            sizes.append(os.fstat(file.fileno()).st_size)
        return {"shards": list(self.shards), "filled": self._filled, "sizes": sizes}

    def forget(self) -> None:
        """Remove the spools of finished shards; called once a state after them is safe."""
        for path in self.folder.glob(".*.*"):
            if int(path.name[1:6]) < len(self.shards):
                path.unlink()

    @property
    def num_rows(self) -> int:
        """Rows in finished shards."""
        return sum(int(shard["rows"]) for shard in self.shards)

    def _close(self) -> None:
        with ExitStack() as stack:  # all of them, also where a full disk refuses the last bytes of one
            for file in self._files:
                stack.callback(file.close)
            self._files.clear()

    def __enter__(self) -> Spool:
        try:
            self._open(self._sizes)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError) if any(exception) else nullcontext():
            self._close()
