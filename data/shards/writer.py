"""Token rows into shard files, so that a killed preparing can continue after the last shard that it finished.

Rows go straight into an open Arrow file, 128 at a time. A state is small: which shards are done, how many rows of the open
file are on the disk, and the rows that are not written yet. To continue from it those rows of the open file are copied.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.batches.collate import IGNORED_LABEL
from data.dataset import ROWS_PER_BATCH_KEY
from data.shards.store import BATCH_ROWS
from data.task import ShardFormat
from language import say
from storage import rename

Column = tuple[NDArray[Any], NDArray[np.int64]]  # ids or labels of many rows end to end, and the length of each row
BUFFER_BYTES = 1024**2
SHARD_ROWS = 65536  # of one shard file
BEFORE_SCHEMA = 8  # bytes of an Arrow file, behind which it reads like a stream


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
        self.format = format
        self.shards: list[dict[str, Any]] = []
        id_type: type[np.generic] = np.uint16 if vocab_size <= 2**16 else np.int32
        label_type: type[np.generic] = np.float32 if is_regression else np.int32
        self._dtypes = [label_type if name == format.label_column else id_type for name in format.columns]
        fields = [
            pa.field(name, pa.list_(pa.from_numpy_dtype(dtype)))
            for name, dtype in zip(format.columns, self._dtypes, strict=True)
        ]
        self._schema = pa.schema(fields, metadata={ROWS_PER_BATCH_KEY: str(BATCH_ROWS).encode()})
        self._held: list[tuple[NDArray[Any], NDArray[np.int64]]] = [
            (np.zeros(0, dtype), np.zeros(0, np.int64)) for dtype in self._dtypes
        ]
        self._file: _SummedFile | None = None
        self._arrow: Any = None
        self._rows, self._attempt = 0, 0  # of the open file
        if state is not None:
            self._continue_from(state)

    def _continue_from(self, state: dict[str, Any]) -> None:
        self.shards, self._attempt = list(state["shards"]), state["attempt"]
        self._held = [
            (np.array(ids, dtype), np.array(lengths, np.int64))
            for dtype, (ids, lengths) in zip(self._dtypes, state["held"], strict=True)
        ]
        earlier, self._attempt = self._open_path(), self._attempt + 1  # the state names the earlier file until the next
        if not state["rows"]:
            return
        if not earlier.exists():  # it was finished after the state
            earlier = self.folder / f"{len(self.shards):05d}.arrow"
        with earlier.open("rb") as file:
            file.seek(BEFORE_SCHEMA)
            for batch in pa.ipc.open_stream(file):
                self._write(batch)
                if self._rows >= state["rows"]:
                    break
        if self._rows != state["rows"]:
            raise ValueError(say("{earlier} is shorter than it was", earlier=earlier))

    def _open_path(self) -> Path:
        return self.folder / f"{len(self.shards):05d}.{self._attempt}.tmp"

    def add(self, columns: Sequence[Column]) -> None:
        """Append rows; of a stream, any number of tokens."""
        for place, (ids, lengths) in enumerate(columns):
            held_ids, held_lengths = self._held[place]
            if ids.dtype.kind == "f" and held_ids.dtype.kind == "i":
                ids = np.nan_to_num(ids, nan=IGNORED_LABEL)
            ids = np.concatenate([held_ids, ids.astype(self._dtypes[place])])
            if row_tokens := self.format.row_tokens:
                lengths = np.full(len(ids) // row_tokens, row_tokens)
            else:
                lengths = np.concatenate([held_lengths, lengths])
            self._held[place] = ids, lengths
        while len(self._held[0][1]) >= min(BATCH_ROWS, SHARD_ROWS - self._rows):
            self._write(self._next_batch())

    def _next_batch(self) -> pa.RecordBatch:
        arrays = []
        for place, (ids, lengths) in enumerate(self._held):
            count = min(BATCH_ROWS, SHARD_ROWS - self._rows, len(lengths))
            offsets = np.zeros(count + 1, np.int32)
            np.cumsum(lengths[:count], out=offsets[1:])
            size = int(offsets[-1])
            arrays.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids[:size])))
            self._held[place] = ids[size:], lengths[count:]
        return pa.record_batch(arrays, schema=self._schema)

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
        name, path = f"{len(self.shards):05d}.arrow", self._open_path()
        self._arrow.close()
        self._file.close()
        rename(path, self.folder / name)
        self.shards.append({"file": name, "rows": self._rows, "crc32": self._file.crc32})
        self._file, self._rows = None, 0

    def finish(self) -> None:
        """Write the rows that are still held."""
        for place, (ids, lengths) in enumerate(self._held):
            if rest := len(ids) - int(lengths.sum()):  # of a stream
                self._held[place] = ids, np.append(lengths, rest)
        if len(self._held[0][1]):
            self._write(self._next_batch())
        if self._rows:
            self._finish_shard()

    def state(self) -> dict[str, Any]:
        """Bring everything to disk and say how to come back to this point."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        held = [(ids.tolist(), lengths.tolist()) for ids, lengths in self._held]
        return {"shards": self.shards, "attempt": self._attempt, "rows": self._rows, "held": held}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            if self._file is not None:
                if any(error):
                    stack.enter_context(suppress(OSError))
                stack.callback(self._file.close)


class _SummedFile(io.BufferedWriter):
    """A new file that knows the CRC-32 of what was written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"), BUFFER_BYTES)
        self.crc32 = 0

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self.crc32 = zlib.crc32(view, self.crc32)
        return super().write(view)
