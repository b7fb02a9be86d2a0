"""Rows of Parquet and Arrow files as records, column -> cell.

Parquet is read without `pre_buffer`, with which the reader keeps every row group that it has seen, and in batches of at most 256
rows and about 8 MiB. Arrow files of this machine are mapped. A library follows the offsets of an Arrow file blindly, so each batch
is validated first. Cells become Python values one row at a time.

Source: Arrow columnar format, "Security considerations".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.sources.expressions import NUMBER, TABLE, TURNS
from data.sources.files import Source
from data.sources.lines import LONGEST_LINE_BYTES, Record, too_long
from data.sources.places import Place
from formats import ARROW_STREAM, PARQUET
from language import say
from settings.fields import listed

BATCH_ROWS, PARQUET_BATCH_BYTES = 256, 8 * 1024**2
BUFFER, FAR_BUFFER = 1024**2, 8 * 1024**2  # of a column, read at a time; from an address each reading takes its time
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def parquet_file(path: Place, **options: Any) -> pq.ParquetFile:
    """A Parquet file, open, of which nothing that was read stays; `options` as `pq.ParquetFile` takes them."""
    if isinstance(path, Path):
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER, **options)
    return pq.ParquetFile(path.open(), pre_buffer=False, buffer_size=FAR_BUFFER, **options)


@contextmanager
def _arrow_reader(source: Source) -> Iterator[Any]:
    with pa.memory_map(str(source.path)) if isinstance(source.path, Path) else source.path.open() as file:
        yield pa.ipc.open_stream(file) if source.kind == ARROW_STREAM else pa.ipc.open_file(file)


def table_schema(source: Source) -> pa.Schema:
    """The columns of a Parquet or Arrow file and their types; raises what Arrow raises."""
    if source.kind == PARQUET:
        with parquet_file(source.path) as file:
            schema = file.schema_arrow
    else:
        with _arrow_reader(source) as reader:
            schema = reader.schema
    _ = schema.names  # which may be no UTF-8
    return schema


def cell_of(kind: pa.DataType) -> Any:
    """A cell such as a type allows, with the keys of tables; None where that is no cell of a row of text."""
    if pa.types.is_struct(kind):
        return {kind.field(place).name: cell_of(kind.field(place).type) for place in range(kind.num_fields)}
    if is_list(kind):
        return [cell_of(kind.value_type)]
    return "" if _is_text(kind) else {} if _is_table(kind) else 0 if _is_count(kind) else None


def type_problems(path: Place, schema: pa.Schema, kinds: Mapping[str, set[str]]) -> list[str]:
    """What is wrong with the types of columns.

    Args:
        kinds: column -> what its cells may hold besides text, as `Columns.kinds` tells.
    """
    return [
        say(
            "{path}: column {name} holds {value}, not text; give a text column",
            path=path,
            name=name,
            value=listed([kind]),
        )
        for name, may in kinds.items()
        if not _is_text(kind := schema.field(name).type)
        and not (TURNS in may and (is_list(kind) or pa.types.is_struct(kind)))
        and not (TABLE in may and _is_table(kind))
        and not (NUMBER in may and _is_count(kind))
    ]


def table_records(source: Source, columns: Sequence[str]) -> Iterator[tuple[int, Record]]:
    """The number of each row, from 1, and its cells; in place of one that cannot be read a ValueError that says why.

    Args:
        columns: names that the file has once each.
    """
    number = 0
    for batch in _batches(source, columns):
        for row in zip(*map(_cells, batch.columns), strict=True):
            number += 1
            yield number, dict(zip(columns, row, strict=True))


def _batches(source: Source, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    names = list(columns)
    if source.kind == PARQUET:
        with parquet_file(source.path) as file:
            for batch in file.iter_batches(parquet_batch_rows(file.metadata), columns=names, use_threads=False):
                yield batch.select(names)  # in our order, not in the file's
        return
    with _arrow_reader(source) as reader:
        is_stream = source.kind == ARROW_STREAM
        for batch in reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)):
            if batch.num_rows < 0:
                raise pa.ArrowInvalid(f"a batch has {batch.num_rows} rows")
            picked = batch.select(names)
            for column in picked.columns:
                column.validate()
                # texts as bytes: one that is not UTF-8 is one bad row
                column.view(_BYTES.get(column.type, column.type)).validate(full=True)
            yield from (picked.slice(first, BATCH_ROWS) for first in range(0, picked.num_rows, BATCH_ROWS))


def parquet_batch_rows(metadata: pq.FileMetaData) -> int:
    """Rows of a Parquet file, at most 256, that make about 8 MiB by what its footer says of its row groups."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    widest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1.0)
    return max(1, min(BATCH_ROWS, int(PARQUET_BATCH_BYTES / max(1.0, widest))))


def _cells(column: pa.Array) -> Iterable[Any]:
    """Cells as Python knows them; of long texts, and of values that rows share, each is made when it is asked for."""
    kind = column.type
    if pa.types.is_floating(kind):  # 3.8 stays 3.8, however few bits it has
        column = column.cast(pa.string()).cast(pa.float64())
    with suppress(UnicodeDecodeError):
        if _is_count(kind) or (kind in _BYTES and column.nbytes < LONGEST_LINE_BYTES):
            return list(column.to_pylist())
    return map(_cell, column)


def _cell(scalar: pa.Scalar) -> Any:
    scalar = scalar.value if pa.types.is_dictionary(scalar.type) else scalar
    try:
        if scalar.type in _BYTES and scalar.is_valid and scalar.as_buffer().size >= LONGEST_LINE_BYTES:
            return ValueError(too_long())
        return scalar.as_py()
    except UnicodeDecodeError:
        return ValueError(say("is not UTF-8"))
    except ValueError as error:
        return error


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return kind in _BYTES or bool(pa.types.is_null(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether cells of a type are lists of any length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_table(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether a type is one that numpy holds as it is."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_count(kind: pa.DataType) -> bool:
    return is_number(kind) or bool(pa.types.is_boolean(kind) or pa.types.is_decimal(kind))


def fits_json(kind: pa.DataType) -> bool:
    """Whether JSON has values such as those of a type: texts, numbers and truth values."""
    return _is_text(kind) or is_number(kind) or bool(pa.types.is_boolean(kind))
