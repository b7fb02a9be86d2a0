"""Rows of any format, in bounded memory, and what happens to a broken one.

The reader of a format gives records, column -> cell; `Columns` makes rows of text of them. A broken row stops with its
file and number, or, with `skip_bad_rows`, is counted. A file is looked at once before its rows are read (`head_of`),
and never read as a whole: Parquet pages and 16 MiB lines are the largest pieces. A longer line or text is a bad row.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from data.sources.columns import Columns
from data.sources.formats import ENCRYPTED, TEXT
from data.sources.layouts import TEACHES, recognise
from data.sources.lines import BadRows, Record
from data.sources.reader import Head, reader_of
from data.sources.source import TABLES, Source
from data.text.conversations import TextRow
from settings.declared import DataConfig
from settings.errors import DoesNotFit, UserError, collected, reason_of, refuse
from settings.fields import is_encodable, listed
from support.child_process import CRASHED, MEMORY, ChildDied
from support.language import join, say
from support.units import format_size

BATCH_ROWS = 256
BATCH_CHARS = 1024**2
READ_ERRORS = (pa.ArrowException, OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError, OverflowError)
TOO_LARGE = say(
    "a row may be far larger than the others, or unpack to far more than it shows: leave that row out, write the file "
    "anew in smaller pieces, or give --memory_budget more"
)


@contextmanager
def reading(source: Source) -> Iterator[None]:
    """A context in which what a file does to a library becomes one sentence that names the file."""
    try:
        yield
    except UserError:
        raise
    except MemoryError:
        raise DoesNotFit(
            "{path}: reading it takes more memory than there is room for; {too_large}",
            path=source.path,
            too_large=TOO_LARGE,
        ) from None
    except Exception as error:
        # The client of a service lets the errors of any library pass while a file is read.
        if not isinstance(error, READ_ERRORS) and isinstance(source.path, Path):
            raise
        reason = " ".join(str(error).split())[:200]
        if source.kind in TABLES and "crypt" in reason.lower():
            raise UserError("{path}: {encrypted}", path=source.path, encrypted=say(ENCRYPTED)) from None
        raise UserError(
            "{path}: is cut off or broken, or not {kind} ({reason}); write, pack or download it again",
            path=source.path,
            kind=source.kind,
            reason=reason,
        ) from None


@contextmanager
def reading_in_child(files: str, max_bytes: int) -> Iterator[None]:
    """A context in which the death of a child that reads becomes one sentence that names its files.

    Args:
        files: for messages. max_bytes: of memory that the child may hold.
    """
    try:
        yield
    except ChildDied as died:
        if died.reason == MEMORY:
            raise DoesNotFit(
                "{files}: reading takes more than {size}; {too_large}",
                files=files,
                size=format_size(max_bytes),
                too_large=TOO_LARGE,
            ) from None
        if died.reason == CRASHED:
            raise UserError(
                "{files}: reading has crashed a library ({died}); fetch or write the file anew", files=files, died=died
            ) from None
        raise


def head_of(source: Source) -> Head:
    """Look at the beginning of a file; what was found is kept while its size and time of change stay.

    Raises:
        UserError: the file cannot be read.
    """
    with reading(source):
        state = source.path.stat()
        return _head(source, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1024)
def _head(source: Source, size: int, changed: int) -> Head:
    return reader_of(source.kind).head(source)


def what_it_teaches(data: DataConfig, source: Source) -> tuple[str | None, Columns | None]:
    """Whether a file holds "pairs", "preferences", "conversations" or "text", and the columns that say so.

    Both are None where no name is known.

    Raises:
        UserError: the file cannot be read.
    """
    if source.kind == TEXT:
        return TEACHES[1], Columns((data.text_column,))
    columns = recognise(data, head_of(source))
    return (None, None) if columns is None else (TEACHES[len(columns.texts)], columns)


def records(source: Source, columns: Sequence[str], bad_rows: BadRows) -> Iterator[tuple[int, Record]]:
    """The number (see `place_of`) and the cells of each record, of these at least the columns."""
    return reader_of(source.kind).records(source, head_of(source), columns, bad_rows)


def read_rows(
    sources: Iterable[Source], columns: Columns | Sequence[str], bad_rows: BadRows
) -> Iterator[list[TextRow]]:
    """Read the wanted columns of all rows, in order.

    Args:
        sources: files, read one after the other.
        columns: what rows are made of, or names of text columns; plain text has one, whatever its name.
        bad_rows: told about each broken row.
    Returns:
        batches of 1 .. 256 rows and of about 1 Mi characters at most, each row a tuple of strings: the texts, and of
            columns with turns JSON of these.
    Raises:
        UserError: a file is broken or lacks a column. DoesNotFit: there is no memory for it.
    Memory:
        one batch, and what its format needs to give it: a line, or a Parquet page of each wanted column.
    """
    sources = list(sources)
    check_columns(sources, columns)
    for source in sources:
        yield from read_source(source, columns, bad_rows)


def read_source(source: Source, columns: Columns | Sequence[str], bad_rows: BadRows) -> Iterator[list[TextRow]]:
    """Read one file whose columns have been checked; the same file gives the same batches. See `read_rows`."""
    batch: list[TextRow] = []
    chars = 0
    with reading(source):
        row_columns = Columns.of(columns)
        names = head_of(source).all_names
        row_of = row_columns.row_of(names)
        for number, record in records(source, list(row_columns.kinds(names)), bad_rows):
            try:
                row = row_of(record)
                for text in row:
                    text.encode("utf8")
            except UnicodeEncodeError:
                name = next(cell for cell, text in zip(row_columns.cells(), row, strict=True) if not is_encodable(text))
                bad_rows.add(source, number, say("{name} holds half of a surrogate pair", name=name))
            except ValueError as error:
                bad_rows.add(source, number, reason_of(error))
            else:
                batch.append(row)
                chars += sum(map(len, row))
                if chars >= BATCH_CHARS or len(batch) == BATCH_ROWS:
                    yield batch
                    batch = []
                    chars = 0
        row_columns.check_end(row_of)
        if batch:
            yield batch


def check_columns(sources: Iterable[Source], columns: Columns | Sequence[str]) -> None:
    """Find what is wrong with the columns of any file, before hours are spent on the others.

    Raises:
        UserError: all problems at once.
    """
    problems: list[str] = []
    for source in sources:
        with collected(problems):
            check = _check_text if source.kind == TEXT else _check_file
            check(source, Columns.of(columns))
    refuse(problems)


def _check_text(source: Source, columns: Columns) -> None:
    if len(columns.texts) != 1 or columns.form != "plain":
        raise UserError(
            "{file}: plain text has no columns {columns}; use JSONL, CSV, Parquet or Arrow",
            file=source.path,
            columns=join(", ", columns.cells()),
        )


def _check_file(source: Source, columns: Columns) -> None:
    names = list(head_of(source).all_names)
    kinds = columns.kinds(names)
    problems = [say("column {name} occurs twice", name=name) for name in kinds if names.count(name) > 1]
    missing = [name for name in kinds if name not in names]
    if missing:
        message = "column {names} is missing" if len(missing) == 1 else "columns {names} are missing"
        problems.append(say(message, names=listed(missing)))
    if problems:
        raise UserError(columns.missing(source.path, join(", ", problems), names))
    check_types(source, columns)


def check_types(source: Source, columns: Columns) -> None:
    """Refuse columns of a table that have no text, nor what may stand in its place.

    Raises:
        UserError: all problems at once.
    """
    head = head_of(source)
    refuse(
        [
            say(
                "{path}: column {name} holds {value}, not text; give a text column",
                path=source.path,
                name=name,
                value=listed([head.types[name]]),
            )
            for name, shapes in columns.kinds(head.all_names).items()
            if name in head.types and type(head.sample[name]) not in shapes
        ]
    )
