"""How are the text columns of Parquet and Arrow files read in small pieces, and what is wrong with a broken one?

Parquet is read without `pre_buffer`: with it, the reader keeps every row group it has seen. Arrow files are mapped, so
their pages can be given back at any time; each batch is validated before it is trusted, because a corrupt offset would
otherwise be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data.sources import ARROW_STREAM, PARQUET, Source
from settings import UserError

ReportBadRow = Callable[[Path, str, str], None]
ARROW_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError)


@contextmanager
def broken_file_is_user_error(path: Path, what: str) -> Iterator[None]:
    """Turn Arrow's complaints about a file into one sentence."""
    try:
        yield
    except ARROW_ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is cut off or broken, or not {what} ({reason}); write or fetch it anew") from None


def _schema(source: Source) -> pa.Schema:
    with broken_file_is_user_error(source.path, source.kind):
        if source.kind == PARQUET:
            with pq.ParquetFile(source.path, pre_buffer=False) as file:
                return file.schema_arrow
        with pa.memory_map(str(source.path)) as file:
            return (pa.ipc.open_stream(file) if source.kind == ARROW_STREAM else pa.ipc.open_file(file)).schema


def table_columns(source: Source) -> list[str]:
    """List the columns of a Parquet or Arrow file."""
    return list(_schema(source).names)


def table_batches(
    source: Source, columns: Sequence[str], batch_rows: int, report_bad_row: ReportBadRow
) -> Iterator[list[tuple[str, ...]]]:
    """Read text columns in batches.

    Args:
        source: a Parquet or Arrow file that has these columns, each once.
        batch_rows: most rows of one batch.
        report_bad_row: called with file, place and problem for a null or a text that is not UTF-8.
    Raises:
        UserError: the file is broken, or a column holds no text.
    """
    _check_types(source, columns)
    first = 1
    with broken_file_is_user_error(source.path, source.kind):
        for batch in _record_batches(source, columns, batch_rows):
            cells = [_texts(batch.column(name)) for name in columns]
            rows = []
            for offset, row in enumerate(zip(*cells, strict=True)):
                wrong = next((place for place, cell in enumerate(row) if not isinstance(cell, str)), None)
                if wrong is None:
                    rows.append(row)
                else:
                    problem = "is null" if row[wrong] is None else "is not UTF-8"
                    report_bad_row(source.path, f"row {first + offset}", f"{columns[wrong]} {problem}")
            first += batch.num_rows
            if rows:
                yield rows


def _check_types(source: Source, columns: Sequence[str]) -> None:
    schema = _schema(source)
    problems = [
        f"{source.path}: column {name} holds {schema.field(name).type}, not text; name a text column"
        for name in columns
        if not _is_text(schema.field(name).type)
    ]
    if problems:
        raise UserError(*problems)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view() or pa.types.is_null(kind)
    )


def _record_batches(source: Source, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    if source.kind == PARQUET:
        with pq.ParquetFile(source.path, pre_buffer=False) as file:
            yield from file.iter_batches(batch_size=batch_rows, columns=list(columns), use_threads=False)
        return
    with pa.memory_map(str(source.path)) as file:
        for batch in _ipc_batches(file, source.kind):
            picked = batch.select(list(columns))
            for start in range(0, picked.num_rows, batch_rows):
                part = picked.slice(start, batch_rows)
                _validate(part)
                yield part


def _validate(batch: pa.RecordBatch) -> None:
    """Check that all offsets point inside their buffers; texts are checked later, cell by cell."""
    for column in batch.columns:
        as_bytes = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(column.type)
        if as_bytes is None:
            column.validate()
        else:
            column.view(as_bytes).validate(full=True)


def _ipc_batches(file: pa.NativeFile, kind: str) -> Iterator[pa.RecordBatch]:
    if kind == ARROW_STREAM:
        yield from pa.ipc.open_stream(file)
        return
    reader = pa.ipc.open_file(file)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _texts(column: pa.Array) -> list[str | bytes | None]:
    """Cells as strings; None for a null, bytes where they are not UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return [_decoded(cell) for cell in column.cast(pa.large_binary()).to_pylist()]


def _decoded(cell: bytes | None) -> str | bytes | None:
    try:
        return None if cell is None else cell.decode("utf8")
    except UnicodeDecodeError:
        return cell
