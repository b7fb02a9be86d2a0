"""How is one row of one Arrow or Parquet file found and read, without keeping anything of it?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.sources import ARROW_STREAM, Source
from settings import UserError

ROWS_PER_BATCH_KEY = b"rows_per_batch"  # in the schema of files whose batches, but the last, all have that many rows


class TableFile(Protocol):
    """One file that gives its rows by number."""

    source: Source
    columns: list[str]
    num_rows: int

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """Give one row as plain values."""

    def close(self) -> None:
        """Let go of everything that is open."""


class ArrowTable:
    """An Arrow IPC file or stream, mapped; batches are found by the number of their first row.

    Memory:
        8 bytes a batch (16 for a stream); nothing for files that name their rows per batch.
    """

    def __init__(self, source: Source, reopen: bool) -> None:
        self.source, self.reopen = source, reopen
        self._open_file: tuple[pa.MemoryMappedFile, Any] | None = None
        self._offsets: NDArray[np.int64] | None = None
        with pa.memory_map(str(source.path)) as file:
            reader = pa.ipc.open_stream(file) if source.kind == ARROW_STREAM else pa.ipc.open_file(file)
            self.schema = reader.schema
            self.columns = list(self.schema.names)
            index = self._index_stream(file) if source.kind == ARROW_STREAM else self._index_file(reader)
        self._starts = index  # None with a fixed batch size
        self.num_rows = self._fixed_rows if index is None else int(index[-1])

    def _index_file(self, reader: pa.ipc.RecordBatchFileReader) -> NDArray[np.int64] | None:
        batches = reader.num_record_batches
        self._rows_per_batch = int((self.schema.metadata or {}).get(ROWS_PER_BATCH_KEY, 0))
        if self._rows_per_batch and batches:
            self._fixed_rows = (batches - 1) * self._rows_per_batch + reader.get_batch(batches - 1).num_rows
            return None
        return starts(reader.get_batch(number).num_rows for number in range(batches))

    def _index_stream(self, file: pa.MemoryMappedFile) -> NDArray[np.int64]:
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
            rows.append(pa.ipc.read_record_batch(message, self.schema).num_rows)
        self._offsets = np.array(offsets, np.int64)
        return starts(rows)

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """Give one row as plain values."""
        if self._starts is None:
            number, inside = divmod(row, self._rows_per_batch)
        else:
            number = int(np.searchsorted(self._starts, row, side="right")) - 1
            inside = row - int(self._starts[number])
        if not self.reopen:
            if self._open_file is None:
                self._open_file = self._open()
            return self._values(*self._open_file, number, inside, columns)
        file, reader = self._open()
        with file:
            return self._values(file, reader, number, inside, columns)

    def _open(self) -> tuple[pa.MemoryMappedFile, Any]:
        file = pa.memory_map(str(self.source.path))
        return file, None if self._offsets is not None else pa.ipc.open_file(file)

    def _values(
        self, file: pa.MemoryMappedFile, reader: Any, number: int, inside: int, columns: Sequence[str]
    ) -> dict[str, Any]:
        if self._offsets is None:
            batch = reader.get_batch(number)
        else:
            file.seek(int(self._offsets[number]))
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), self.schema)
        return {name: plain(batch.column(name)[inside]) for name in columns}

    def close(self) -> None:
        """Let go of the mapping."""
        if self._open_file is not None:
            self._open_file[0].close()
            self._open_file = None


class ParquetTable:
    """A Parquet file with its metadata kept, and one row group in memory.

    Memory:
        about 1.5 KB per row group, and the wanted columns of one row group (of none with `reopen`, which then decodes a
        row group for every read: such files are better prepared first).
    """

    def __init__(self, source: Source, reopen: bool) -> None:
        self.source, self.reopen = source, reopen
        with pq.ParquetFile(source.path, pre_buffer=False) as file:
            self.metadata = file.metadata
            self.columns = list(file.schema_arrow.names)
        groups = range(self.metadata.num_row_groups)
        self._starts = starts(self.metadata.row_group(number).num_rows for number in groups)
        self.num_rows = int(self._starts[-1])
        self._file: pq.ParquetFile | None = None
        self._group: tuple[int, tuple[str, ...], pa.Table] | None = None

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """Give one row as plain values."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        table = self._row_group(number, tuple(columns))
        values = {name: plain(table.column(name)[row - int(self._starts[number])]) for name in columns}
        if self.reopen:
            del table
            self.close()
        return values

    def _row_group(self, number: int, columns: tuple[str, ...]) -> pa.Table:
        if self._group is None or self._group[:2] != (number, columns):
            self._group = None
            pa.default_memory_pool().release_unused()
            if self._file is None:
                self._file = pq.ParquetFile(self.source.path, metadata=self.metadata, pre_buffer=False)
            self._group = (number, columns, self._file.read_row_group(number, columns=list(columns), use_threads=False))
        return self._group[2]

    def close(self) -> None:
        """Let go of the file and of the row group."""
        self._group = None
        if self._file is not None:
            self._file.close()
            self._file = None


def starts(rows: Iterable[int]) -> NDArray[np.int64]:
    """First row of each part, and the number of all rows."""
    return np.cumsum([0, *rows], dtype=np.int64)


def plain(scalar: pa.Scalar) -> Any:
    """Copy an Arrow value out: lists of numbers as numpy arrays, all else as Python values."""
    kind = scalar.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not scalar.is_valid or scalar.values.null_count:
        return scalar.as_py()
    if pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type):
        return scalar.values.to_numpy(zero_copy_only=False).copy()
    return scalar.as_py()
