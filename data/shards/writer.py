"""Token rows into shard files, so that a killed preparing can continue after the last shard that it finished.

Rows go straight into an open Arrow file, 128 at a time. A state is small: which shards are done, how many rows of the
open file are on the disk, and the rows that are not written yet. To continue from it those rows of the open file are
copied.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.batches.collate import IGNORED_LABEL
from data.dataset import ROWS_PER_BATCH_KEY
from data.shards.store import BATCH_ROWS
from data.task import ShardFormat
from support.language import say
from support.storage import rename

Column = tuple[NDArray[Any], NDArray[np.int64]]  # ids or labels of many rows end to end, and the length of each row
BUFFER_BYTES = 1024**2
SHARD_ROWS = 65536  # A shard file has no more rows.
BEFORE_SCHEMA = 8  # bytes of an Arrow file, behind which it reads like a stream


class HeldColumn:
    """The rows of a column that are not written yet.

    Args:
        dtype: of the stored ids or labels.
        row_tokens: the rows are one stream, cut into pieces of this length; 0: each row has its own.
    """

    def __init__(self, dtype: type[np.generic], row_tokens: int) -> None:
        self.dtype = dtype
        self.row_tokens = row_tokens
        self.ids: NDArray[Any] = np.zeros(0, dtype)
        self.lengths: NDArray[np.int64] = np.zeros(0, np.int64)

    def add(self, ids: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        if issubclass(self.dtype, np.integer):
            ids = np.nan_to_num(ids, nan=IGNORED_LABEL)
        self.ids = np.concatenate([self.ids, ids.astype(self.dtype)])
        self.lengths = np.concatenate([self.lengths, lengths])
        if self.row_tokens:
            self.lengths = np.full(len(self.ids) // self.row_tokens, self.row_tokens)

    def add_rest(self) -> None:
        """Make a row of the end of a stream, which is shorter than the others."""
        last_length = len(self.ids) - int(self.lengths.sum())
        if last_length:
            self.lengths = np.append(self.lengths, last_length)

    def take(self, rows: int) -> pa.ListArray:
        """The first rows, which are no longer held."""
        lengths = self.lengths[:rows]
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        size = int(offsets[-1])
        cells = pa.ListArray.from_arrays(pa.array(offsets), pa.array(self.ids[:size]))
        self.ids = self.ids[size:]
        self.lengths = self.lengths[rows:]
        return cells


class ShardWriter:
    """The rows of one split on their way to disk; a context, which closes the open file.

    Args:
        folder: the split's folder, made if it is not there.
        vocab_size: ids below 65,536 are stored in two bytes, others in four.
        is_regression: whether labels are numbers to be predicted, stored as float32; those of classes take four bytes.
        state: what `state` returned at the point to continue from; None: a new split.
    Raises:
        ValueError: the files are not those of that state.
    Memory:
        what `add` is given, and up to 128 rows.
    """

    def __init__(
        self,
        folder: Path,
        format: ShardFormat,
        vocab_size: int,
        state: dict[str, Any] | None = None,
        is_regression: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.shards: list[dict[str, Any]] = []
        dtypes: dict[str, type[np.generic]]
        dtypes = dict.fromkeys(format.columns, np.uint16 if vocab_size <= 2**16 else np.int32)
        if format.label_column:
            dtypes[format.label_column] = np.float32 if is_regression else np.int32
        self._columns = [HeldColumn(dtype, format.row_tokens) for dtype in dtypes.values()]
        fields = [pa.field(name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in dtypes.items()]
        self._schema = pa.schema(fields, metadata={ROWS_PER_BATCH_KEY: str(BATCH_ROWS).encode()})
        self._file: _SummedFile | None = None
        self._arrow: Any = None
        # Rows of the open file, and the number in its name, which each attempt to continue raises:
        self._rows = 0
        self._attempt = 0
        if state is not None:
            self._continue_from(state)

    def _continue_from(self, state: dict[str, Any]) -> None:
        self.shards = list(state["shards"])
        self._attempt = state["attempt"]
        for column, (ids, lengths) in zip(self._columns, state["held"], strict=True):
            column.add(np.array(ids, column.dtype), np.array(lengths, np.int64))
        earlier = self._open_path()
        self._attempt += 1  # the state names the earlier file until the next
        if not state["rows"]:
            return
        if not earlier.exists():  # it was finished after the state
            earlier = self._finished_path()
        with earlier.open("rb") as file:
            file.seek(BEFORE_SCHEMA)
            for batch in islice(pa.ipc.open_stream(file), state["rows"] // BATCH_ROWS):
                self._write(batch)
        if self._rows != state["rows"]:
            raise ValueError(say("{earlier} is shorter than it was", earlier=earlier))

    def _open_path(self) -> Path:
        return self.folder / f"{len(self.shards):05d}.{self._attempt}.tmp"

    def _finished_path(self) -> Path:
        return self.folder / f"{len(self.shards):05d}.arrow"

    def add(self, columns: Sequence[Column]) -> None:
        """Append rows; of a stream, any number of tokens."""
        for column, (ids, lengths) in zip(self._columns, columns, strict=True):
            column.add(ids, lengths)
        while len(self._columns[0].lengths) >= self._batch_rows():
            self._write_held()

    def _batch_rows(self) -> int:
        return min(BATCH_ROWS, SHARD_ROWS - self._rows)

    def _write_held(self) -> None:
        rows = self._batch_rows()
        self._write(pa.record_batch([column.take(rows) for column in self._columns], schema=self._schema))

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._file is None:
            self._file = _SummedFile(self._open_path())
            self._arrow = pa.ipc.new_file(self._file, self._schema)
        self._arrow.write_batch(batch)
        self._rows += batch.num_rows
        if self._rows == SHARD_ROWS:
            self._finish_shard()

    def _finish_shard(self) -> None:
        assert self._file is not None
        path = self._finished_path()
        self._arrow.close()
        self._file.close()
        rename(self._open_path(), path)
        self.shards.append({"file": path.name, "rows": self._rows, "crc32": self._file.crc32})
        self._file = None
        self._rows = 0

    def finish(self) -> None:
        """Write the rows that are still held."""
        self._columns[0].add_rest()  # A stream has one column.
        if len(self._columns[0].lengths):
            self._write_held()
        if self._rows:
            self._finish_shard()

    def state(self) -> dict[str, Any]:
        """Bring everything to disk and say how to come back to this point."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        columns = [(column.ids.tolist(), column.lengths.tolist()) for column in self._columns]
        return {"shards": self.shards, "attempt": self._attempt, "rows": self._rows, "held": columns}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            with suppress(OSError) if any(error) else nullcontext():
                self._file.close()


class _SummedFile(io.BufferedWriter):
    """A new file that knows the CRC-32 of what was written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"), BUFFER_BYTES)
        self.crc32 = 0

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self.crc32 = zlib.crc32(view, self.crc32)
        return super().write(view)
