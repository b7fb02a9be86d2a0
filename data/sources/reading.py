"""Rows of any format, in bounded memory, and what happens to a broken one.

Each format gives records, column -> cell; `Columns` makes rows of text of them. Of plain text a row is a paragraph (lines up to a
blank one); one longer than 16 KiB is split at a line's end. A broken row stops with its file and number, or, with `skip_bad_rows`,
is counted. A file is looked at once before its rows are read (`head_of`), and never read as a whole: Parquet pages and 16 MiB
lines are the largest pieces. A longer line or text is a bad row.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from data.sources.csv_rows import Dialect, csv_header, csv_records, dialect_of
from data.sources.fasta import FASTA_COLUMNS, fasta_records
from data.sources.files import OBJECTS, TABLES, Source, collected
from data.sources.json_rows import first_objects, objects
from data.sources.layouts import Columns
from data.sources.lines import BadRows, Record, decoded_lines, paragraphs, place_of
from data.sources.tables import cell_of, table_records, table_schema, type_problems
from data.text.conversations import TextRow
from formats import ENCRYPTED, FASTA, TEXT
from language import join, say
from settings.errors import DoesNotFit, UserError, reason_of, refuse
from settings.fields import is_encodable, listed

BATCH_ROWS = 256
BATCH_CHARS = 1024**2
READ_ERRORS = (pa.ArrowException, OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError, OverflowError)
TOO_LARGE = say(
    "a row may be far larger than the others, or unpack to far more than it shows: leave that row out, write the file anew in smaller "
    "pieces, or give --memory_budget more"
)


@dataclass(frozen=True)
class Head:
    """What the beginning of a file says of its rows.

    Args:
        names: its columns, of objects those of the first; plain text has none.
        all_names: with those that only some of the first objects have, as where nothing is written for an empty text.
        sample: of each column a cell of the type of the first that is not null, of tables with their keys.
        schema: of Parquet and Arrow. dialect: of CSV and TSV.
    """

    names: list[str]
    all_names: list[str]
    sample: dict[str, Any]
    schema: pa.Schema | None = None
    dialect: Dialect | None = None

    @property
    def is_quoted(self) -> bool:
        return self.dialect is not None and "quoting" not in self.dialect[0]


@contextmanager
def reading(source: Source) -> Iterator[None]:
    """A context in which what a file does to a library becomes one sentence that names the file."""
    try:
        yield
    except MemoryError:
        raise DoesNotFit(
            "{path}: reading it takes more memory than there is room for; {too_large}",
            path=source.path,
            too_large=TOO_LARGE,
        ) from None
    except UserError:
        raise
    except Exception as error:
        # What the client of a service raises while a file is read may be any library's.
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
    if source.kind == TEXT:
        return Head([], [], {})
    if source.kind in TABLES:
        schema = table_schema(source)
        names = list(schema.names)
        return Head(names, names, {field.name: cell_of(field.type) for field in schema}, schema)
    if source.kind in OBJECTS:
        firsts, sample = first_objects(source), dict[str, Any]()
        for value in firsts:
            sample |= {name: _outline(cell) for name, cell in value.items() if sample.get(name) in (None, [])}
        return Head(list(firsts[0]), list(sample), sample)
    if source.kind == FASTA:
        names = list(FASTA_COLUMNS)
        return Head(names, names, dict.fromkeys(names, ""))
    dialect = dialect_of(source)
    names = csv_header(source, dialect)
    return Head(names, names, dict.fromkeys(names, ""), dialect=dialect)


def _outline(cell: Any, depth: int = 2) -> Any:
    """A cell of the same type, which takes no memory: of a table its keys, of a list its first entry."""
    if isinstance(cell, dict):
        return {key: _outline(value, depth - 1) if depth else None for key, value in cell.items()}
    if isinstance(cell, list):
        return [_outline(entry, depth - 1) for entry in cell[:1]] if depth else []
    return "" if isinstance(cell, str) else cell


def records(source: Source, wanted: Sequence[str], bad_rows: BadRows) -> Iterator[tuple[int, Record]]:
    """The number (see `place_of`) and the cells of each record, of these at least the wanted ones."""
    if source.kind in TABLES:
        return table_records(source, wanted)
    if source.kind in OBJECTS:
        return objects(source, bad_rows)
    if source.kind == FASTA:
        return fasta_records(source, bad_rows)
    dialect = head_of(source).dialect
    assert dialect is not None
    return csv_records(source, dialect, wanted, bad_rows)


def read_rows(
    sources: Iterable[Source], columns: Columns | Sequence[str], bad_rows: BadRows
) -> Iterator[list[TextRow]]:
    """Read the wanted columns of all rows, in order.

    Args:
        sources: files, read one after the other.
        columns: what rows are made of, or names of text columns; plain text has one, whatever its name.
        bad_rows: told about each broken row.
    Returns:
        batches of 1 .. 256 rows and of about 1 Mi characters at most, each row a tuple of strings: the texts, and of columns with
        turns JSON of these.
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
    batch, chars = list[TextRow](), 0
    with reading(source):
        for row in _rows(source, Columns.of(columns), bad_rows):
            batch.append(row)
            chars += sum(map(len, row))
            if len(batch) == BATCH_ROWS or chars >= BATCH_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def _rows(source: Source, columns: Columns, bad_rows: BadRows) -> Iterator[TextRow]:
    if source.kind == TEXT:
        yield from ((text,) for text in paragraphs(decoded_lines(source, bad_rows)))
        return
    names = head_of(source).all_names
    row_of, cells = columns.row_of(names), columns.cells()
    for number, record in records(source, list(columns.kinds(names)), bad_rows):
        try:
            row = row_of(record)
            for name, text in zip(cells, row, strict=True):
                if not is_encodable(text):
                    raise ValueError(say("{name} holds half of a surrogate pair", name=name))
        except ValueError as error:
            bad_rows.add(source.path, place_of(source, number), reason_of(error))
        else:
            yield row


def check_columns(sources: Iterable[Source], columns: Columns | Sequence[str]) -> None:
    """Find what is wrong with the columns of any file, before hours are spent on the others.

    Raises:
        UserError: all problems at once.
    """
    problems: list[str] = []
    for source in sources:
        with collected(problems):
            problems += _column_problems(source, Columns.of(columns))
    refuse(problems)


def _column_problems(source: Source, columns: Columns) -> list[str]:
    if source.kind == TEXT:
        if columns.cells() == [*columns.texts[:1]]:
            return []
        several = "{file}: plain text has no columns {columns}; use JSONL, CSV, Parquet or Arrow"
        return [say(several, file=source.path, columns=join(", ", columns.cells()))]
    head = head_of(source)
    wanted = columns.kinds(head.all_names)
    problems = [say("column {name} occurs twice", name=name) for name in wanted if head.all_names.count(name) > 1]
    if missing := [name for name in wanted if name not in head.all_names]:
        told = "column {names} is missing" if len(missing) == 1 else "columns {names} are missing"
        problems.append(say(told, names=listed(missing)))
    if problems:
        return [columns.missing(source.path, join(", ", problems), head.all_names)]
    return [] if head.schema is None else type_problems(source.path, head.schema, wanted)
