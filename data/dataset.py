"""Rows by number out of files of any size, in flat memory.

`LowMemDataset` gives rows of Arrow IPC files, Arrow streams (Hugging Face's `.arrow`) and Parquet. Values are copied out: a slice
of a batch would keep the whole batch alive. Three modes:

- mmap: files are mapped and kept open; their pages belong to the system's page cache and are given back under pressure.
- file: files are kept open; the record batch of a row is read (of token shards 128 rows), and no page is mapped.
- reopen (`ultra_low_mem`): the same, and the file is opened anew for every read: of it the footer alone is held.

On network mounts use file or reopen: a mapped page that cannot be fetched ends the process.
"""

from __future__ import annotations

import operator
import os
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
from data.sources.reading import reading
from data.sources.source import TABLES, Source
from data.sources.tables import parquet_batch_rows, parquet_file
from formats import ARROW_STREAM, PARQUET
from language import join, say
from settings.errors import UserError, refuse
from settings.fields import listed

ROWS_PER_BATCH_KEY = b"rows_per_batch"  # in the schema of files whose batches, but the last, all have that many rows
MODES = MMAP, FILE, REOPEN = "mmap", "file", "reopen"
OPENED = {MMAP: pa.memory_map, FILE: pa.OSFile}
KEPT_BYTES = 64 * 1024**2  # of decoded rows of a Parquet file
MOST_PROBLEMS = 20  # that are listed of one dataset's columns
NUMBERS = (pa.IntegerArray, pa.FloatingPointArray)  # dates and times are none
CHANGED = say("its size has changed since it was opened")
MOST_OPEN_FILES = 64  # the system's limit on open files is often 1024, or 256


class Reopened:
    """A file for `pa.PythonFile` that is open only while it is read: what Arrow keeps of it is the footer, read once."""

    closed = False

    def __init__(self, path: str, size: int) -> None:
        self._path, self._size, self._place = path, size, 0

    def read(self, count: int) -> bytes:
        with open(self._path, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != self._size:
                raise pa.ArrowInvalid(CHANGED)
            file.seek(self._place)
            content = file.read(count)
        self._place += len(content)
        return content

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        self._place = place + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        pass


class ArrowTable:
    """An Arrow IPC file or stream whose rows are read by number.

    Memory: 8 bytes a record batch (16 for a stream; none for files that name their rows per batch).
    """

    def __init__(self, source: Source, mode: str) -> None:
        self.source, self.mode = source, mode
        self._open: tuple[pa.NativeFile, pa.ipc.RecordBatchFileReader | None] | None = None
        self._offsets: NDArray[np.int64] | None = None  # of a stream, which lists its batches nowhere
        self._rows_per_batch = 0
        with pa.memory_map(str(source.path)) as file:
            self._size = file.size()
            if source.kind == ARROW_STREAM:
                self.schema = pa.ipc.open_stream(file).schema
                rows = self._scan(file)
            else:
                reader = pa.ipc.open_file(file)
                self.schema = reader.schema
                rows = self._count(reader)
        self.columns = list(self.schema.names)
        if min(rows, default=0) < 0:
            raise pa.ArrowInvalid("a batch has less than no rows")
        self._starts = starts(rows)
        self.num_rows = int(self._starts[-1])

    def _count(self, reader: pa.ipc.RecordBatchFileReader) -> list[int]:
        batches, stated = reader.num_record_batches, (self.schema.metadata or {}).get(ROWS_PER_BATCH_KEY, b"0")
        if not (stated.isdigit() and len(stated) < 10):
            raise pa.ArrowInvalid("the number of rows per batch is no number")
        if int(stated) and batches:
            self._rows_per_batch = int(stated)
            return [(batches - 1) * self._rows_per_batch, reader.get_batch(batches - 1).num_rows]
        return [reader.get_batch(number).num_rows for number in range(batches)]

    def _scan(self, file: pa.MemoryMappedFile) -> list[int]:
        if any(pa.types.is_dictionary(kind) for kind in self.schema.types):
            raise UserError(
                "{path}: a stream with dictionary columns cannot be read by row; write an Arrow file",
                path=self.source.path,
            )
        offsets, rows = list[int](), list[int]()
        file.seek(0)
        pa.ipc.read_message(file)  # the schema
        while (offset := file.tell()) < self._size:
            try:
                message = pa.ipc.read_message(file)
            except EOFError:  # the mark of the end
                break
            offsets.append(offset)
            rows.append(pa.ipc.read_record_batch(message, self.schema).num_rows)
        self._offsets = np.array(offsets, np.int64)
        return rows

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        if self._rows_per_batch:
            number, inside = divmod(row, self._rows_per_batch)
        else:
            number = int(np.searchsorted(self._starts, row, side="right")) - 1
            inside = row - int(self._starts[number])
        if self._open is None:
            path = str(self.source.path)
            file = pa.PythonFile(Reopened(path, self._size), "r") if self.mode == REOPEN else OPENED[self.mode](path)
            if file.size() != self._size:
                raise pa.ArrowInvalid(CHANGED)
            self._open = file, pa.ipc.open_file(file) if self._offsets is None else None
        file, reader = self._open
        if reader is not None:
            batch = reader.get_batch(number)
        else:
            assert self._offsets is not None
            file.seek(int(self._offsets[number]))
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), self.schema)
        return _plain_row(batch, inside, columns)

    def close(self) -> None:
        if self._open is not None:
            self._open[0].close()
            self._open = None


class ParquetTable:
    """A Parquet file of whose rows up to 64 MiB, of one row group, are kept.

    Of a larger group a row that was dropped is reached by decoding the group again from its beginning: in order that is fast, at
    random it is slow. Such files are better prepared first.

    Memory: about 1.5 KB per row group, and the wanted columns of one row group up to 64 MiB; nothing stays with "reopen".
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
        self._at: tuple[int, tuple[str, ...]] | None = None  # the group and the columns of what is kept
        # batches that follow each other, each with its first row
        self._kept: deque[tuple[int, pa.RecordBatch]] = deque()
        self._kept_bytes = self._end = 0  # of them; and the row behind them
        self._later: Iterator[pa.RecordBatch] = iter(())

    def read(self, row: int, columns: Sequence[str]) -> dict[str, Any]:
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        inside, wanted = row - int(self._starts[number]), (number, tuple(columns))
        if self._at != wanted or not self._kept or inside < self._kept[0][0]:
            self._begin(*wanted)
        while inside >= self._end:
            batch = next(self._later, None)
            if batch is None:
                raise pa.ArrowInvalid("a row group has fewer rows than the footer says")
            self._kept.append((self._end, batch))
            self._kept_bytes, self._end = self._kept_bytes + batch.nbytes, self._end + batch.num_rows
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popleft()[1].nbytes
        first, batch = self._kept[bisect_right(self._kept, inside, key=lambda kept: kept[0]) - 1]
        values = _plain_row(batch, inside - first, columns)
        if self.mode == REOPEN:
            self.close()
        return values

    def _begin(self, number: int, columns: tuple[str, ...]) -> None:
        self._forget()
        pa.default_memory_pool().release_unused()
        if self._file is None:
            self._file = parquet_file(self.source.path, metadata=self.metadata)
        rows = parquet_batch_rows(self.metadata)
        self._later = self._file.iter_batches(rows, [number], list(columns), use_threads=False)
        self._at = number, columns

    def _forget(self) -> None:
        self._later, self._kept_bytes, self._end = iter(()), 0, 0
        self._kept.clear()

    def close(self) -> None:
        self._forget()
        if self._file is not None:
            self._file.close()
            self._file = None


def _plain_row(batch: pa.RecordBatch, inside: int, columns: Sequence[str]) -> dict[str, Any]:
    """Copy a row out of a batch: lists of numbers as numpy arrays, all else as Python values."""
    if inside >= batch.num_rows:
        raise pa.ArrowInvalid("a batch has fewer rows than the file says")
    return {name: _plain(batch.column(name).slice(inside, 1)) for name in columns}


def _plain(cell: pa.Array) -> Any:
    cell.validate(full=True)  # offsets of a damaged file would be followed out of it
    scalar = cell[0]
    if isinstance(scalar, pa.ListScalar) and scalar.is_valid:
        numbers = scalar.values
        if isinstance(numbers, NUMBERS) and not numbers.null_count:
            return np.from_dlpack(numbers).copy()  # `to_numpy` would import pandas where it is installed: 30 MiB.
    return scalar.as_py()


def starts(rows: Iterable[int]) -> NDArray[np.int64]:
    """First row of each part, and the number of all rows."""
    return np.cumsum([0, *rows], dtype=np.int64)


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
        self.ultra_low_mem = self.mode == REOPEN
        self._check_mode(ultra_low_mem)
        paths = [path_or_paths] if isinstance(path_or_paths, (str, Path)) else list(path_or_paths)
        sources = [source for path in paths for source in find(str(path), "path")]
        self._files = [self._open(source) for source in sources]
        self.columns = list(columns) if columns is not None else list(self._files[0].columns)
        self._check_columns()
        self._starts: list[int] = starts(file.num_rows for file in self._files).tolist()
        self._recent: deque[int] = deque()  # files that hold something open, the one opened longest ago first
        self._pid = os.getpid()

    def _check_mode(self, ultra_low_mem: bool) -> None:
        problems = []
        if self.mode not in MODES:
            problems.append(
                say("mode = {mode}, is not known; allowed: {modes}", mode=self.mode, modes=join(", ", MODES))
            )
        elif ultra_low_mem and self.mode != REOPEN:
            problems.append(
                say("mode = {mode}, contradicts ultra_low_mem = True; leave one of them out", mode=self.mode)
            )
        refuse(problems)

    def _open(self, source: Source) -> ArrowTable | ParquetTable:
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
            return (ParquetTable if source.kind == PARQUET else ArrowTable)(source, self.mode)

    def _check_columns(self) -> None:
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
        if problems:
            raise UserError(*problems[:MOST_PROBLEMS])

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        """Read one row.

        Args:
            index: 0 .. len - 1, or counted from the end if negative; slices are not taken.
        Raises:
            IndexError: no such row. UserError: the file broke since it was opened.
        """
        row = operator.index(index)
        count = self._starts[-1]
        row = row + count if row < 0 else row
        if not 0 <= row < count:
            raise IndexError(f"row {index} of {count}")
        if self._pid != os.getpid():  # handles of the parent process are not ours
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

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

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
        first, last = begin // self.row_tokens, (end - 1) // self.row_tokens
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
