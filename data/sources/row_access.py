"""How is one row of one Arrow or Parquet file found and read, without keeping anything of it?"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.packed.arrow_buffers import PackedBatches, packed_batches
from data.sources.arrow_checks import checked
from data.sources.files import Source
from data.sources.ranges import RangeIndex, plain
from data.sources.tables import parquet_batch_rows, parquet_file, unpacks_to
from formats import ARROW_STREAM
from settings.errors import UserError

ROWS_PER_BATCH_KEY = b"rows_per_batch"  # in the schema of files whose batches, but the last, all have that many rows
MODES = MMAP, FILE, REOPEN = "mmap", "file", "reopen"
LARGEST_GROUP_BYTES = 64 * 1024**2  # of a Parquet row group that is decoded as a whole


class TableFile(Protocol):
    """One file that gives its rows by number."""

    source: Source
    columns: list[str]
    num_rows: int

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """Give one row as plain values."""

    def close(self) -> None:
        """Release everything that is open."""


class ArrowTable:
    """An Arrow IPC file or stream; batches are found by the number of their first row.

    Args:
        mode: "mmap" (mapped and kept open), "file" (kept open, read in ranges) or "reopen" (opened for every read).
    Memory:
        9 bytes a batch (17 for a stream; one for files that name their rows per batch), and without a mapping 24 bytes a
        batch and column that was read.
    """

    def __init__(self, source: Source, mode: str) -> None:
        self.source, self.mode = source, mode
        self._open_file: tuple[pa.MemoryMappedFile, Any] | None = None
        self._handle: io.FileIO | None = None
        self._offsets: NDArray[np.int64] | None = None
        with pa.memory_map(str(source.path)) as file, self._packed() as packed:
            reader = pa.ipc.open_stream(file) if source.kind == ARROW_STREAM else pa.ipc.open_file(file)
            self.schema = reader.schema
            self.columns = list(self.schema.names)
            self._size = file.size()
            is_stream = source.kind == ARROW_STREAM
            index = self._index_stream(file, packed) if is_stream else self._index_file(reader, packed)
        self._starts = index  # None with a fixed batch size
        self.num_rows = self._fixed_rows if index is None else int(index[-1])
        self._ranges = RangeIndex(self.schema, self._num_batches)
        self._checked: dict[tuple[str, ...], NDArray[np.bool_]] = {}  # columns -> which batches were found sound

    def _packed(self) -> AbstractContextManager[PackedBatches]:
        return packed_batches(self.source.path, self.source.kind == ARROW_STREAM)

    def _index_file(self, reader: pa.ipc.RecordBatchFileReader, packed: PackedBatches) -> NDArray[np.int64] | None:
        batches = self._num_batches = reader.num_record_batches
        told = (self.schema.metadata or {}).get(ROWS_PER_BATCH_KEY, b"0")
        if not (told.isdigit() and len(told) < 10):
            raise pa.ArrowInvalid("the number of rows per batch is no number")
        self._rows_per_batch = int(told)
        if self._rows_per_batch and batches:
            packed.check(batches - 1)
            self._fixed_rows = (batches - 1) * self._rows_per_batch + _num_rows(reader.get_batch(batches - 1))
            return None
        rows = []
        for number in range(batches):
            packed.check(number)
            rows.append(_num_rows(reader.get_batch(number)))
        return starts(rows)

    def _index_stream(self, file: pa.MemoryMappedFile, packed: PackedBatches) -> NDArray[np.int64]:
        if any(pa.types.is_dictionary(kind) for kind in self.schema.types):
            raise UserError(
                f"{self.source.path}: a stream with dictionary columns cannot be read by row; write an Arrow file"
            )
        file.seek(0)
        pa.ipc.read_message(file)  # the schema
        offsets, rows = [], []
        size = file.size()
        while (offset := file.tell()) < size:
            try:
                message = pa.ipc.read_message(file)
            except EOFError:  # the mark of the end
                break
            offsets.append(offset)
            packed.check_next()
            rows.append(_num_rows(pa.ipc.read_record_batch(message, self.schema)))
        self._offsets = np.array(offsets, np.int64)
        self._num_batches = len(offsets)
        return starts(rows)

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """Give one row as plain values."""
        if self._starts is None:
            number, inside = divmod(row, self._rows_per_batch)
        else:
            number = int(np.searchsorted(self._starts, row, side="right")) - 1
            inside = row - int(self._starts[number])
        if self.mode == MMAP:
            if self._open_file is None:
                self._open_file = self._open()
            return self._values(*self._open_file, number, inside, columns)
        if self._ranges.knows(number, columns):
            return self._read_ranges(number, inside, columns)
        file, reader = self._open()
        with file:
            batch = self._sound_batch(file, reader, number, columns)
            self._ranges.learn(number, batch, file, columns)
            return {name: plain(batch.column(name), inside) for name in columns}

    def _read_ranges(self, number: int, inside: int, columns: Sequence[str]) -> dict[str, Any]:
        """Read only the bytes of the row, where it is known where they lie."""
        handle = self._handle or io.FileIO(str(self.source.path))
        try:
            if self._handle is None and os.fstat(handle.fileno()).st_size != self._size:
                raise pa.ArrowInvalid("its size has changed since it was opened")
            return {name: self._ranges.read(handle, name, number, inside) for name in columns}
        finally:
            if self.mode == FILE:
                self._handle = handle
            else:
                handle.close()

    def _open(self) -> tuple[pa.MemoryMappedFile, Any]:
        file = pa.memory_map(str(self.source.path))
        return file, None if self._offsets is not None else pa.ipc.open_file(file)

    def _batch(self, file: pa.MemoryMappedFile, reader: Any, number: int) -> pa.RecordBatch:
        if self._offsets is None:
            return reader.get_batch(number)
        file.seek(int(self._offsets[number]))
        return pa.ipc.read_record_batch(pa.ipc.read_message(file), self.schema)

    def _sound_batch(
        self, file: pa.MemoryMappedFile, reader: Any, number: int, columns: Sequence[str]
    ) -> pa.RecordBatch:
        """A batch that has been validated once since the file was opened here."""
        sound = self._checked.setdefault(tuple(columns), np.zeros(self._num_batches, np.bool_))
        if not sound[number] and self._starts is None:  # the others were looked at when the file was opened
            with self._packed() as packed:
                packed.check(number)
        batch = self._batch(file, reader, number)
        if not sound[number]:
            checked(batch, columns)
            if self._starts is None and number < self._num_batches - 1 and batch.num_rows != self._rows_per_batch:
                raise pa.ArrowInvalid(f"a batch has {batch.num_rows} rows and not {self._rows_per_batch}")
            sound[number] = True
        return batch

    def _values(
        self, file: pa.MemoryMappedFile, reader: Any, number: int, inside: int, columns: Sequence[str]
    ) -> dict[str, Any]:
        batch = self._sound_batch(file, reader, number, columns)
        return {name: plain(batch.column(name), inside) for name in columns}

    def close(self) -> None:
        """Let go of the mapping and the handle."""
        if self._open_file is not None:
            self._open_file[0].close()
            self._open_file = None
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            handle.close()


class ParquetTable:
    """A Parquet file with its metadata kept, and in memory one row group, or of a large one about 8 MiB of rows.

    A row of a large group is reached by decoding the group from its beginning, or from the last row that was read if
    that lies before it: in order that is fast, at random it is slow. Such files are better prepared first.

    Memory:
        about 1.5 KB per row group, and the wanted columns of one row group up to 64 MiB; nothing stays with "reopen".
    """

    def __init__(self, source: Source, mode: str) -> None:
        self.source, self.mode = source, mode
        with parquet_file(source.path) as file:
            self.metadata = file.metadata
            self.columns = list(file.schema_arrow.names)
        groups = range(self.metadata.num_row_groups)
        self._starts = starts(self.metadata.row_group(number).num_rows for number in groups)
        self.num_rows = int(self._starts[-1])
        self._file: pq.ParquetFile | None = None
        self._columns: tuple[str, ...] = ()
        self._group = -1
        self._small: dict[tuple[int, tuple[str, ...]], bool] = {}
        self._first = 0  # of the batch, inside its group
        self._batch: pa.RecordBatch | pa.Table | None = None
        self._later: Iterator[pa.RecordBatch] = iter(())

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """Give one row as plain values."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        inside = row - int(self._starts[number])
        if (number, tuple(columns)) != (self._group, self._columns) or inside < self._first or self._batch is None:
            self._begin(number, tuple(columns))
        assert self._batch is not None
        while inside >= self._first + self._batch.num_rows:
            self._first += self._batch.num_rows
            self._batch = next(self._later)
        values = {name: plain(self._batch.column(name), inside - self._first) for name in columns}
        if self.mode == REOPEN:
            self.close()
        return values

    def _begin(self, number: int, columns: tuple[str, ...]) -> None:
        self._batch, self._later = None, iter(())
        pa.default_memory_pool().release_unused()
        if self._file is None:
            self._file = parquet_file(self.source.path, metadata=self.metadata)
        self._group, self._columns, self._first = number, columns, 0
        wanted = {"columns": list(columns), "use_threads": False}
        group = self.metadata.row_group(number)
        if self._fits(number, columns):
            self._batch = self._file.read_row_group(number, **wanted)
        else:
            rows = parquet_batch_rows(self.source.path, self._file, columns, group.num_rows, group=number)
            self._later = self._file.iter_batches(batch_size=rows, row_groups=[number], **wanted)
            self._batch = next(self._later)

    def _fits(self, number: int, columns: tuple[str, ...]) -> bool:
        """Whether a group may be in memory as a whole; found out once."""
        if (number, columns) not in self._small:
            place, rows = self.source.path, self.metadata.row_group(number).num_rows
            self._small[number, columns] = rows <= parquet_batch_rows(
                place, self._file, columns, rows, LARGEST_GROUP_BYTES, number
            ) and unpacks_to(place, self._file, number, columns, LARGEST_GROUP_BYTES)
        return self._small[number, columns]

    def close(self) -> None:
        """Let go of the file and of the rows."""
        self._batch, self._later = None, iter(())
        if self._file is not None:
            self._file.close()
            self._file = None


def _num_rows(batch: pa.RecordBatch) -> int:
    if batch.num_rows < 0:
        raise pa.ArrowInvalid(f"a batch has {batch.num_rows} rows")
    return int(batch.num_rows)


def starts(rows: Iterable[int]) -> NDArray[np.int64]:
    """First row of each part, and the number of all rows."""
    return np.cumsum([0, *rows], dtype=np.int64)
