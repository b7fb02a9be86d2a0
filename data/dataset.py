"""Rows by number out of files of any size, in flat memory.

`LowMemDataset` gives rows of Arrow IPC files, Arrow streams (Hugging Face's `.arrow`) and Parquet. Values are copied
out: a slice of a batch would keep the whole batch alive. Three modes:

- mmap: files are mapped and kept open; their pages belong to the system's page cache and are given back under pressure.
- file: files are kept open; the record batch of a row is read (of token shards 128 rows), and no page is mapped.
- reopen (`ultra_low_mem`): the same, and the file is opened anew for every read: of it the footer alone is held.

On network mounts use file or reopen: a mapped page that cannot be fetched ends the process.
"""

from __future__ import annotations

import operator
import os
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.sources.files import find
from data.sources.formats import ARROW_FILE, ARROW_STREAM, PARQUET
from data.sources.reading import reading
from data.sources.source import Source
from data.sources.tables import parquet_batch_rows, parquet_file
from settings.errors import UserError, refuse
from settings.fields import listed
from support.language import join, say

# In the schema of files whose batches, but the last, all have that many rows:
ROWS_PER_BATCH_KEY = b"rows_per_batch"
MOST_DIGITS = 9  # A longer number of rows per batch is not taken.
MODES = MMAP, FILE, REOPEN = "mmap", "file", "reopen"
KEPT_BYTES = 64 * 1024**2  # Decoded rows that stay in memory beside the one that is read.
MOST_PROBLEMS = 20  # No more problems of columns are listed.
NUMBERS = (pa.IntegerArray, pa.FloatingPointArray)  # Dates and times are none.
CHANGED = say("its size has changed since it was opened")
MOST_OPEN_FILES = 64  # The system's limit on open files is often 1024, or 256.


class Reopened:
    """A file for `pa.PythonFile` that is open only while it is read: what Arrow keeps of it is the footer, read
    once.
    """

    closed = False

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = os.stat(path).st_size
        self._position = 0

    def read(self, count: int) -> bytes:
        with open(self._path, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != self._size:
                raise pa.ArrowInvalid(CHANGED)
            file.seek(self._position)
            content = file.read(count)
        self._position += len(content)
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        pass


OPENERS = {MMAP: pa.memory_map, FILE: pa.OSFile, REOPEN: lambda path: pa.PythonFile(Reopened(path), "r")}


class LastBatch:
    """The record batch that the last row came from, one for all files of a dataset: neighbours of that row lie in it
    too.

    A batch of more than `KEPT_BYTES` is not kept, and none with "reopen".
    """

    def __init__(self) -> None:
        self.key: tuple[ArrowTable, int] | None = None
        self.batch: pa.RecordBatch | None = None

    def forget(self) -> None:
        self.key = None
        self.batch = None


class ArrowTable:
    """An Arrow IPC file whose rows are read by number.

    Args:
        source: the file. mode: one of `MODES`. last: shared with the other files of a dataset.
    Memory: 8 bytes a record batch (none for files that name their rows per batch).
    """

    schema: pa.Schema
    num_rows: int
    _starts: Sequence[int]  # The first row of each batch.

    def __init__(self, source: Source, mode: str, last: LastBatch) -> None:
        self.source = source
        self.mode = mode
        self._last = last
        self._file: pa.NativeFile | None = None
        self._reader: Any = None
        with pa.memory_map(str(source.path)) as file:
            self._size = file.size()
            self._scan(file)
        self.columns = list(self.schema.names)

    def _scan(self, file: pa.NativeFile) -> None:
        """Find out which rows each batch has."""
        reader = pa.ipc.open_file(file)
        self.schema = reader.schema
        count = reader.num_record_batches
        stated = (self.schema.metadata or {}).get(ROWS_PER_BATCH_KEY, b"0")
        if not stated.isdigit() or len(stated) > MOST_DIGITS:
            raise pa.ArrowInvalid("the number of rows per batch is no number")
        rows_per_batch = int(stated)
        if rows_per_batch and count:
            self._starts = range(0, rows_per_batch * count, rows_per_batch)
            _, rows_of_last = starts([reader.get_batch(count - 1).num_rows])
            self.num_rows = self._starts[-1] + rows_of_last
        else:
            self._starts, self.num_rows = starts(reader.get_batch(number).num_rows for number in range(count))

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """Copy a row out of its batch."""
        number = bisect_right(self._starts, row) - 1
        inside = row - self._starts[number]
        if self._last.key == (self, number):
            return _plain_row(self._last.batch, inside, columns)
        self._last.forget()  # Two batches are never held.
        if self._file is None:
            file = OPENERS[self.mode](str(self.source.path))
            if file.size() != self._size:
                raise pa.ArrowInvalid(CHANGED)
            self._reader = self._reader_of(file)
            self._file = file
        batch = self._batch(number)
        if self.mode != REOPEN and batch.get_total_buffer_size() <= KEPT_BYTES:
            self._last.batch = batch
            self._last.key = self, number
        return _plain_row(batch, inside, columns)

    def _reader_of(self, file: pa.NativeFile) -> Any:
        return pa.ipc.open_file(file)

    def _batch(self, number: int) -> pa.RecordBatch:
        return self._reader.get_batch(number)

    def close(self) -> None:
        self._last.forget()
        if self._file is not None:
            self._file.close()
        self._file = None
        self._reader = None


class StreamTable(ArrowTable):
    """The same of an Arrow stream, which lists its batches nowhere.

    Memory: 16 bytes a record batch.
    """

    def _scan(self, file: pa.NativeFile) -> None:
        self.schema = pa.ipc.open_stream(file).schema
        if any(map(pa.types.is_dictionary, self.schema.types)):
            raise UserError(
                "{path}: a stream with dictionary columns cannot be read by row; write an Arrow file",
                path=self.source.path,
            )
        self._offsets = array("q")
        rows = array("q")
        file.seek(0)
        pa.ipc.read_message(file)  # The first message is the schema.
        while (offset := file.tell()) < self._size:
            try:
                message = pa.ipc.read_message(file)
            except EOFError:  # A mark ends the stream.
                break
            self._offsets.append(offset)
            rows.append(pa.ipc.read_record_batch(message, self.schema).num_rows)
        self._starts, self.num_rows = starts(rows)

    def _reader_of(self, file: pa.NativeFile) -> Any:
        return file

    def _batch(self, number: int) -> pa.RecordBatch:
        self._reader.seek(self._offsets[number])
        return pa.ipc.read_record_batch(pa.ipc.read_message(self._reader), self.schema)


class RowGroup:
    """The last decoded rows of a row group of a Parquet file, up to 64 MiB.

    Args:
        number: of the group in its file. batches: all its rows, in their order.
    """

    def __init__(self, number: int, batches: Iterator[pa.RecordBatch]) -> None:
        self.number = number
        self.first = 0  # The first row that is still in memory.
        self._end = 0  # The row behind the last that was decoded.
        self._batches = batches
        self._decoded: deque[tuple[int, pa.RecordBatch]] = deque()  # Each batch with its first row.
        self._decoded_bytes = 0

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """Copy out a row that is not before the first."""
        while row >= self._end:
            batch = next(self._batches, None)
            if batch is None:
                raise pa.ArrowInvalid("a row group has fewer rows than the footer says")
            self._decoded.append((self._end, batch))
            self._end += batch.num_rows
            self._decoded_bytes += batch.nbytes
            while self._decoded_bytes > KEPT_BYTES and len(self._decoded) > 1:
                self._decoded_bytes -= self._decoded.popleft()[1].nbytes
            self.first = self._decoded[0][0]
        first, batch = self._decoded[bisect_right(self._decoded, row, key=operator.itemgetter(0)) - 1]
        return _plain_row(batch, row - first, columns)


class ParquetTable:
    """A Parquet file of whose rows up to 64 MiB, of one row group, are kept.

    Of a larger group a row that was dropped is reached by decoding the group again from its beginning: in order that is
    fast, at random it is slow. Such files are better prepared first.

    Memory: about 1.5 KB per row group, and the wanted columns of one row group up to 64 MiB; nothing stays with
    "reopen".
    """

    def __init__(self, source: Source, mode: str, last: LastBatch) -> None:
        self.source = source
        self.mode = mode
        with parquet_file(source.path) as file:
            self.metadata = file.metadata
            self.columns = list(file.schema_arrow.names)
        groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
        self._starts, self.num_rows = starts(group.num_rows for group in groups)
        self._file: pq.ParquetFile | None = None
        self._group: RowGroup | None = None

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        """Copy a row out of its row group."""
        number = bisect_right(self._starts, row) - 1
        inside = row - self._starts[number]
        if self._group is None or number != self._group.number or inside < self._group.first:
            self._group = None
            pa.default_memory_pool().release_unused()
            if self._file is None:
                self._file = parquet_file(self.source.path, metadata=self.metadata)
            rows = parquet_batch_rows(self.metadata)
            batches = self._file.iter_batches(rows, [number], list(columns), use_threads=False)
            self._group = RowGroup(number, batches)
        values = self._group.read(inside, columns)
        if self.mode == REOPEN:
            self.close()
        return values

    def close(self) -> None:
        self._group = None
        if self._file is not None:
            self._file.close()
        self._file = None


TABLES: dict[str, type[ArrowTable] | type[ParquetTable]] = {
    ARROW_FILE: ArrowTable,
    ARROW_STREAM: StreamTable,
    PARQUET: ParquetTable,
}


def _plain_row(batch: pa.RecordBatch, inside: int, columns: Sequence[str]) -> dict[str, Any]:
    """Copy a row out of a batch: lists of numbers as numpy arrays, all else as Python values."""
    if inside >= batch.num_rows:
        raise pa.ArrowInvalid("a batch has fewer rows than the file says")
    return {name: _plain(batch.column(name).slice(inside, 1)) for name in columns}


def _plain(cell: pa.Array) -> Any:
    cell.validate(full=True)  # Offsets of a damaged file would be followed out of it.
    scalar = cell[0]
    numbers = scalar.values if isinstance(scalar, pa.ListScalar) else None
    if isinstance(numbers, NUMBERS) and not numbers.null_count:
        return np.from_dlpack(numbers).copy()  # `to_numpy` would import pandas where it is installed: 30 MiB.
    return scalar.as_py()


def starts(sizes: Iterable[int]) -> tuple[Sequence[int], int]:
    """The first row of each part, by their rows, and the number of all rows."""
    first_rows = array("q")
    row = 0
    for size in sizes:
        if size < 0:
            raise pa.ArrowInvalid("a batch has less than no rows")
        first_rows.append(row)
        row += size
    return first_rows, row


class LowMemDataset(Sequence[dict[str, Any]]):
    """Rows by number from Arrow and Parquet files of any size. Safe to fork and to pickle.

    Args:
        path_or_paths: a file, a folder, a glob, or a list of these; rows count on from file to file.
        columns: the columns of a row; None: all.
        ultra_low_mem: open the file anew for every read, the same as mode "reopen".
        mode: "mmap", "file" or "reopen"; None: mmap, or reopen with `ultra_low_mem`.
    Raises:
        UserError: a file is missing, broken, of a kind that has no rows by number, or lacks a column.
    Memory:
        8 bytes per record batch (none for our own shards), 1.5 KB per Parquet row group; reads leave nothing behind but
        reclaimable file pages, for Parquet one row group, of a large one 8 MiB.
    """

    def __init__(
        self,
        path_or_paths: str | Path | Sequence[str | Path],
        columns: Sequence[str] | None = None,
        ultra_low_mem: bool = False,
        *,
        mode: str | None = None,
    ) -> None:
        self.mode = mode or (REOPEN if ultra_low_mem else MMAP)
        if self.mode not in MODES:
            raise UserError("mode = {mode}, is not known; allowed: {modes}", mode=self.mode, modes=join(", ", MODES))
        if ultra_low_mem and self.mode != REOPEN:
            raise UserError("mode = {mode}, contradicts ultra_low_mem = True; leave one of them out", mode=self.mode)
        paths = [path_or_paths] if isinstance(path_or_paths, (str, Path)) else path_or_paths
        self._last = LastBatch()
        self._files = [self._table(source) for path in paths for source in find(str(path), "path")]
        self.columns = list(self._files[0].columns if columns is None else columns)
        problems = [
            say(
                "{path}: column {name} {problem}; columns: {columns}",
                path=file.source.path,
                name=name,
                problem=say("occurs twice") if name in file.columns else say("is missing"),
                columns=listed(file.columns),
            )
            for file in self._files
            for name in dict.fromkeys(self.columns)
            if file.columns.count(name) != 1
        ]
        refuse(problems[:MOST_PROBLEMS])
        self._starts, self._num_rows = starts(file.num_rows for file in self._files)
        self._recent: deque[int] = deque()  # Files that hold something open, the one opened longest ago first.
        self._pid = os.getpid()

    def _table(self, source: Source) -> ArrowTable | ParquetTable:
        if not isinstance(source.path, Path):
            raise UserError(
                "{path}: an address has no rows by number; fetch it, or turn it into shards with prepare",
                path=source.path,
            )
        if source.kind not in TABLES:
            raise UserError(
                "{path}: {kind} has no rows by number; turn it into shards with the prepare command",
                path=source.path,
                kind=source.kind,
            )
        with reading(source):
            return TABLES[source.kind](source, self.mode, self._last)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        """Read one row.

        Args:
            index: 0 .. len - 1, or counted from the end if negative; slices are not taken.
        Raises:
            IndexError: no such row. UserError: the file broke since it was opened.
        """
        row = operator.index(index)
        if not -self._num_rows <= row < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        row %= self._num_rows
        if self._pid != os.getpid():  # Handles of the parent process are not ours.
            self.close()
            self._pid = os.getpid()
        number = bisect_right(self._starts, row) - 1
        if number not in self._recent:
            if len(self._recent) == MOST_OPEN_FILES:
                self._files[self._recent.popleft()].close()
            self._recent.append(number)
        file = self._files[number]
        with reading(file.source):
            return file.read(row - self._starts[number], self.columns)

    def close(self) -> None:
        """Let go of all open files; a later read opens them again."""
        for number in self._recent:
            self._files[number].close()
        self._recent.clear()

    def __getstate__(self) -> dict[str, Any]:
        self.close()
        return self.__dict__


class TokenStream(Sequence[dict[str, Any]]):
    """The rows of a token stream read as windows of another length.

    Args:
        dataset: rows of `tokens`, all of the same length but the last.
        window_tokens: length of a window, 2 or more.
    Raises:
        UserError: there are no tokens, or on reading a window, rows are of another length.
    """

    def __init__(self, dataset: Sequence[dict[str, Any]], window_tokens: int) -> None:
        self.dataset = dataset
        self.row_tokens = len(dataset[0]["tokens"])
        self.num_tokens = (len(dataset) - 1) * self.row_tokens + len(dataset[len(dataset) - 1]["tokens"])
        self.window_tokens = min(window_tokens, self.num_tokens)
        if not self.row_tokens:
            raise UserError("the token stream is empty; delete the shards folder and prepare it again")

    def __len__(self) -> int:
        """Whole windows; a stream shorter than one window is one short window."""
        return self.num_tokens // self.window_tokens

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:  # type: ignore[override]
        """Give a window as a row of `tokens`, (window_tokens,) int64, read from the rows that it crosses."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begin = index * self.window_tokens
        end = begin + self.window_tokens
        first = begin // self.row_tokens
        last = (end - 1) // self.row_tokens
        tokens = np.concatenate([self.dataset[row]["tokens"] for row in range(first, last + 1)])
        window = tokens[begin - first * self.row_tokens : end - first * self.row_tokens].astype(np.int64)
        if len(window) != self.window_tokens:
            raise UserError(
                "rows {first} to {last} of the token stream are not of {row_tokens} tokens; delete the shards folder "
                "and prepare it again",
                first=first + 1,
                last=last + 1,
                row_tokens=self.row_tokens,
            )
        return {"tokens": window}
