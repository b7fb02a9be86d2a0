"""Rows of Parquet and Arrow files as records.

Parquet is read without `pre_buffer`, with which the reader keeps every row group that it has seen, and in batches of at
most 256 rows and about 8 MiB. Arrow files of this machine are mapped. A library follows the offsets of an Arrow file
blindly, so each batch is validated first. Cells become Python values one row at a time.

Source: Arrow columnar format, "Security considerations".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.sources.formats import ARROW_FILE
from data.sources.lines import LONGEST_LINE_BYTES, BadRows, Record, too_long
from data.sources.places import Place
from data.sources.reader import Head, Reader, about_bytes
from data.sources.source import Source
from support.language import say

BATCH_ROWS = 256
PARQUET_BATCH_BYTES = 8 * 1024**2
ARROW_ROW_BYTES = 1024  # This much of an Arrow file is taken for a row, as nothing tells better.
# A column is read in pieces; from an address they are larger, as each reading takes its time.
BUFFER = 1024**2
FAR_BUFFER = 8 * 1024**2
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
TEXTS = frozenset({*_BYTES, pa.null()})  # Where all cells of a column are null, it may be one of texts.


class Table(Reader):
    """What Parquet and both forms of Arrow have in common."""

    def _schema(self, source: Source) -> pa.Schema:
        raise NotImplementedError

    def _batches(self, source: Source, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Batches of at most 256 rows with these columns, in this order."""
        raise NotImplementedError

    def head(self, source: Source) -> Head:
        schema = self._schema(source)
        names = list(schema.names)
        samples = {field.name: sample_of(field.type) for field in schema}
        return Head(names, names, samples, {field.name: str(field.type) for field in schema})

    def records(
        self, source: Source, head: Head, columns: Sequence[str], bad_rows: BadRows
    ) -> Iterator[tuple[int, Record]]:
        number = 0
        for batch in self._batches(source, list(columns)):
            for cells in zip(*map(_cells, batch.columns), strict=True):
                number += 1
                yield number, dict(zip(columns, cells, strict=True))


class Parquet(Table):
    """Row groups of any size, whose pages are the largest pieces in memory."""

    def _schema(self, source: Source) -> pa.Schema:
        with parquet_file(source.path) as file:
            return file.schema_arrow

    def _batches(self, source: Source, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with parquet_file(source.path) as file:
            for batch in file.iter_batches(parquet_batch_rows(file.metadata), columns=columns, use_threads=False):
                yield batch.select(columns)  # The file's order may be another.

    def about_rows(self, source: Source) -> int:
        with parquet_file(source.path) as file:
            return int(file.metadata.num_rows)


class Arrow(Table):
    """Batches that a footer finds, or as a stream one behind the other, as Hugging Face `datasets` writes them."""

    @contextmanager
    def _open(self, source: Source) -> Iterator[Any]:
        with pa.memory_map(str(source.path)) if isinstance(source.path, Path) else source.path.open() as file:
            yield pa.ipc.open_file(file) if source.kind == ARROW_FILE else pa.ipc.open_stream(file)

    def _schema(self, source: Source) -> pa.Schema:
        with self._open(source) as reader:
            return reader.schema

    def _batches(self, source: Source, columns: list[str]) -> Iterator[pa.RecordBatch]:
        with self._open(source) as reader:
            batches = reader
            if source.kind == ARROW_FILE:
                batches = map(reader.get_batch, range(reader.num_record_batches))
            for batch in batches:
                if batch.num_rows < 0:
                    raise pa.ArrowInvalid(f"a batch has {batch.num_rows} rows")
                picked = batch.select(columns)
                for column in picked.columns:
                    column.validate()
                    # Texts are validated as bytes: one that is not UTF-8 is one bad row.
                    column.view(_BYTES.get(column.type, column.type)).validate(full=True)
                yield from (picked.slice(first, BATCH_ROWS) for first in range(0, picked.num_rows, BATCH_ROWS))

    def about_rows(self, source: Source) -> int:
        return about_bytes(source) // ARROW_ROW_BYTES


def parquet_file(path: Place, **options: Any) -> pq.ParquetFile:
    """A Parquet file, open, of which nothing that was read stays; `options` as `pq.ParquetFile` takes them."""
    if isinstance(path, Path):
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER, **options)
    return pq.ParquetFile(path.open(), pre_buffer=False, buffer_size=FAR_BUFFER, **options)


def parquet_batch_rows(metadata: pq.FileMetaData) -> int:
    """Rows of a Parquet file, at most 256, that make about 8 MiB by what its footer says of its row groups."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    widest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1.0)
    return max(1, min(BATCH_ROWS, int(PARQUET_BATCH_BYTES / max(1.0, widest))))


def sample_of(kind: pa.DataType) -> Any:
    """A cell such as a type allows, with the keys of tables; None where that is no cell of a row of text."""
    if pa.types.is_struct(kind):
        return {field.name: sample_of(field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [sample_of(kind.value_type)]
    text_type = kind.value_type if pa.types.is_dictionary(kind) else kind
    if text_type in TEXTS:
        return ""
    return next((sample for is_such, sample in SAMPLES if is_such(kind)), None)


def _cells(column: pa.Array) -> Iterable[Any]:
    """Cells as Python knows them; of long texts, and of values that rows share, each is made when it is asked for."""
    kind = column.type
    if pa.types.is_floating(kind):  # 3.8 stays 3.8, however few bits it has.
        column = column.cast(pa.string()).cast(pa.float64())
    is_short = kind in _BYTES and column.nbytes < LONGEST_LINE_BYTES
    with suppress(UnicodeDecodeError):
        if is_short or isinstance(sample_of(kind), (int, Decimal)):
            return list(column.to_pylist())
    return map(_cell, column)


def _cell(scalar: pa.Scalar) -> Any:
    scalar = scalar.value if pa.types.is_dictionary(scalar.type) else scalar
    try:
        if scalar.type in _BYTES and scalar.is_valid and scalar.as_buffer().size >= LONGEST_LINE_BYTES:
            return ValueError(too_long())
        value = scalar.as_py()
        return dict(value or ()) if pa.types.is_map(scalar.type) else value
    except UnicodeDecodeError:
        return ValueError(say("is not UTF-8"))
    except ValueError as error:
        return error


# What the cells of a type without others inside are like, by the first test that it passes.
SAMPLES: tuple[tuple[Callable[[Any], bool], Any], ...] = (
    (pa.types.is_map, {}),
    (pa.types.is_decimal, Decimal()),
    (pa.types.is_boolean, False),
    (pa.types.is_integer, 0),
    (pa.types.is_floating, 0),
)
