"""How do sources become rows, in bounded memory, and what happens to a broken row?

Rows come in small batches of plain strings. Of plain text, a row is a paragraph (lines up to a blank one), or a line if
wanted; a paragraph longer than 16 KiB is split at a line's end. A broken row stops with its file and number, or, with
`skip_bad_rows`, is counted. Nothing reads a file as a whole: Parquet pages and 16 MiB lines are the largest pieces.
A longer line or text is a bad row; a longer paragraph is split.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from data.sources.files import OBJECTS, TABLES, Source
from data.sources.json_rows import objects
from data.sources.layouts import (
    TRANSLATION,
    Optional,
    Table,
    check_stored,
    is_made,
    made,
    recognised,
    stored,
    table_text,
    widened,
)
from data.sources.lines import (
    GBK_REMEDY,
    LONGEST_LINE_BYTES,
    BadRows,
    blocks,
    crowded,
    decoded_lines,
    is_crowded,
    is_gbk,
    numbered_lines,
    paragraphs,
    too_long,
)
from data.sources.tables import check_types, table_batches, table_columns, table_keys
from data.text.conversations import TurnsColumn, check_pair, turns_text
from formats import CSV, TEXT, TSV
from language import join, say
from settings.fields import UserError, counted, is_encodable, listed

BATCH_ROWS = 256
BATCH_CHARS = 1024**2
# of TSV no cell is quoted: a quote is a letter like others (the media type text/tab-separated-values)
DIALECTS: dict[str, dict[str, Any]] = {
    CSV: {"delimiter": ",", "strict": True},
    TSV: {"delimiter": "\t", "strict": True, "quoting": csv.QUOTE_NONE},
}
LOOKED_AT_OBJECTS = 256  # of a file, for columns that some lack
OTHER_DELIMITERS = ";\t"  # of CSV as spreadsheets write it where the comma is the decimal sign
Row = tuple[str, ...]


def column_names(source: Source, text_column: str = "text") -> list[str]:
    """List the columns of a file, of objects those of the first; plain text has the one named `text_column`.

    Raises:
        UserError: the file cannot be read.
    """
    if source.kind == TEXT:
        return [text_column]
    if source.kind in TABLES:
        return table_columns(source)
    if source.kind in OBJECTS:
        return list(next(_first_objects(source)))
    return _header(next(_csv_lines(source, BadRows()), (1, []))[1])


def all_names(source: Source) -> list[str]:
    """`column_names`, of objects with those that only some of the first have, as where nothing is written for an empty text."""
    if source.kind not in OBJECTS:
        return column_names(source)
    return list(dict.fromkeys(name for value in _first_objects(source) for name in value))


def _header(cells: Sequence[str]) -> list[str]:
    """The names of columns, with marks for what is not UTF-8 in them."""
    return [name.encode("utf8", "replace").decode("utf8") for name in cells]


def _first_objects(source: Source) -> Iterator[dict[str, Any]]:
    """The first objects of a file, at least one and about 1 Mi characters; a column may be missing in some."""
    bad_rows = BadRows(skip=True)
    found = (value for _, value in objects(source, bad_rows))
    first = next(found, None)
    told = bad_rows.examples[0] if bad_rows.examples else ""
    if first is None and any(hint in told for hint in (say(GBK_REMEDY), too_long(), crowded())):
        raise UserError(bad_rows.examples[0])
    if first is None:
        begin = next(iter(blocks(source)), b"").lstrip()[:1]
        hint = ""
        if begin == b"[" and source.compression:
            hint = "; an array is read unpacked alone: unpack the file"
        elif begin == b"{":
            hint = "; here an object goes on over lines"
        raise UserError(
            f'{source.path}: holds no JSON object; write one object a line, such as {{"text": "..."}}, or an array of them{hint}'
        )
    yield first
    chars = 0
    for value in islice(found, LOOKED_AT_OBJECTS - 1):
        chars += sum(len(cell) for cell in value.values() if isinstance(cell, str))
        if chars > BATCH_CHARS:
            return
        yield value


def recognised_columns(source: Source) -> tuple[str, str] | None:
    """The columns of prompt and response in a file of a well-known shape; None where it has none.

    Raises:
        UserError: the file cannot be read.
    """
    if source.kind == TEXT:
        return None
    names, keys = column_names(source), []
    if TRANSLATION in names and source.kind in OBJECTS:
        cell = next(_first_objects(source))[TRANSLATION]
        keys = list(cell) if isinstance(cell, dict) else []
    elif TRANSLATION in names and source.kind in TABLES:
        keys = table_keys(source, TRANSLATION)
    found = recognised(names, keys)
    return found and widened(found, all_names(source))


def read_rows(
    sources: Iterable[Source], columns: Sequence[str], bad_rows: BadRows, text_unit: str = "paragraph"
) -> Iterator[list[Row]]:
    """Read the wanted columns of all rows, in order.

    Args:
        sources: files, read one after the other.
        columns: names of text columns; plain text has one, whatever its name.
        bad_rows: told about each broken row.
        text_unit: "paragraph" or "line", the row of plain text.
    Returns:
        batches of 1 .. 256 rows and of about 1 Mi characters at most, each row a tuple of strings in the order of
        `columns`.
    Raises:
        UserError: a file is broken or lacks a column.
    Memory:
        one batch, and what its format needs to give it: a line, or a Parquet page of each wanted column.
    """
    sources = list(sources)
    check_columns(sources, columns)
    for source in sources:
        yield from read_source(source, columns, bad_rows, text_unit)


def read_source(
    source: Source, columns: Sequence[str], bad_rows: BadRows, text_unit: str = "paragraph"
) -> Iterator[list[Row]]:
    """Read one file whose columns have been checked; the same file gives the same batches. See `read_rows`."""
    names = columns if source.kind == TEXT else all_names(source)
    if is_made(columns, names):
        return _made_rows(source, columns, names, bad_rows)
    return _stored_rows(source, columns, bad_rows, text_unit)


def _stored_rows(
    source: Source, columns: Sequence[str], bad_rows: BadRows, text_unit: str = "paragraph"
) -> Iterator[list[Row]]:
    if source.kind in TABLES:
        return table_batches(source, columns, BATCH_ROWS, bad_rows.add)
    return _grouped(_text_rows(source, columns, bad_rows, text_unit))


def _made_rows(source: Source, columns: Sequence[str], names: Sequence[str], bad_rows: BadRows) -> Iterator[list[Row]]:
    """Rows of columns that are made of others."""
    number = 0
    for batch in _stored_rows(source, stored(columns, names), bad_rows):
        rows = []
        for cells in batch:
            number += 1
            try:
                row = made(columns, names, cells)
                check_pair(columns, row)
            except ValueError as error:
                bad_rows.add(source.path, f"readable row {number}", str(error))
            else:
                rows.append(row)
        if rows:
            yield rows


def check_columns(sources: Iterable[Source], columns: Sequence[str]) -> None:
    """Find what is wrong with the columns of any file, before hours are spent on the others.

    Raises:
        UserError: all problems at once.
    """
    problems: list[str] = []
    for source in sources:
        try:
            _check_columns(source, columns)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


def _check_columns(source: Source, columns: Sequence[str]) -> None:
    if source.kind == TEXT:
        if len(columns) > 1:
            raise UserError(
                f"{source.path}: plain text has no columns {', '.join(columns)}; use JSONL, CSV, Parquet or Arrow"
            )
        return
    names = all_names(source)
    wanted = stored(columns, names)
    problems = [f"column {name} occurs twice" for name in wanted if names.count(name) > 1]
    if missing := [name for name in wanted if name not in names]:
        problems.append(
            f"{'column' if len(missing) == 1 else 'columns'} {listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        )
    if problems:
        raise UserError(
            f"{source.path}: {', '.join(problems)}; columns: {listed(names)}; name yours with "
            "--text_column, or --prompt_column and --response_column (dpo: --chosen_column, --rejected_column)"
        )
    if source.kind in TABLES:
        check_types(source, wanted)


def _text_rows(source: Source, columns: Sequence[str], bad_rows: BadRows, text_unit: str) -> Iterator[Row]:
    if source.kind in OBJECTS:
        return _object_rows(source, columns, bad_rows)
    if source.kind in DIALECTS:
        return _csv_rows(source, columns, bad_rows)
    lines = decoded_lines(source, bad_rows)
    return ((text,) for text in (lines if text_unit == "line" else paragraphs(lines)))


def _grouped(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    chars = 0
    for row in rows:
        batch.append(row)
        chars += sum(map(len, row))
        if len(batch) == BATCH_ROWS or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _object_rows(source: Source, columns: Sequence[str], bad_rows: BadRows) -> Iterator[Row]:
    for place, value in objects(source, bad_rows):
        try:
            row = tuple(_cell(value, name) for name in columns)
            check_stored(columns, row)
        except ValueError as error:
            bad_rows.add(source.path, place, str(error))
        else:
            yield row


def _cell(value: dict[str, Any], name: str) -> str:
    """The text of a column; ValueError where it has none."""
    if isinstance(name, Optional) and value.get(name) is None:
        return ""
    if name not in value:
        raise ValueError(f"has no {name}; it has {listed(value) or 'nothing'}")
    cell = value[name]
    if isinstance(name, (TurnsColumn, Table)):
        return _worded_cell(cell, name)
    if not isinstance(cell, str):
        raise ValueError(f"{name} is {'null' if cell is None else type(cell).__name__}, not a text")
    if not is_encodable(cell):
        raise ValueError(f"{name} holds half of a surrogate pair")
    return cell


def _worded_cell(cell: object, name: str) -> str:
    """A cell with turns, or with a table, as a text."""
    try:
        return table_text(cell) if isinstance(name, Table) else turns_text(cell)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _csv_lines(source: Source, bad_rows: BadRows) -> Iterator[tuple[int, list[str]]]:
    """Rows of cells with the number of their last line; bytes that are not UTF-8 come as surrogates."""
    csv.field_size_limit(LONGEST_LINE_BYTES)
    lines, dialect = _CsvLines(source), _dialect(source)
    reader = csv.reader(lines, **dialect)
    while True:
        try:
            lines.size = 0
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad_rows.add(source.path, f"line {lines.number}", f"is not {source.kind.upper()} ({error})")
        except _LineTooLong as error:
            told = str(error)
            hint = join("; ", [told, say("a quote may be missing")]) if source.kind == CSV else told
            bad_rows.add(source.path, f"line {lines.number}", hint)
            reader = csv.reader(lines, **dialect)  # forgets an open quote
        else:
            if cells:
                yield lines.number, cells


def _dialect(source: Source) -> dict[str, Any]:
    """How cells are parted: by commas, or by what parts the first line of a CSV file that has none."""
    dialect = DIALECTS[source.kind]
    if source.kind == CSV:
        with suppress(csv.Error, _LineTooLong):
            header = next(csv.reader(_CsvLines(source), delimiter=","), [])
            if len(header) == 1 and (found := [sign for sign in OTHER_DELIMITERS if sign in header[0]]):
                return {**dialect, "delimiter": found[0]}
    return dialect


class _LineTooLong(Exception):
    """A line over `LONGEST_LINE_BYTES`, or with too many cells."""


class _CsvLines:
    """Lines for the CSV reader; `number` is that of the last one given. A line that is too long is raised, then passed.

    So is the line with which a row of several lines gets too long; `size` is set back before each row.
    """

    def __init__(self, source: Source) -> None:
        self._lines = numbered_lines(source)
        self._too_long = self.number = self.size = 0

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        for number, line in self._lines:
            self.number = number
            if number == self._too_long:  # its later parts
                continue
            self.size += len(line)
            if self.size >= LONGEST_LINE_BYTES:
                self._too_long = number
                raise _LineTooLong(too_long())
            if is_crowded(line):
                raise _LineTooLong(crowded())
            return line.decode("utf8", "surrogateescape")
        raise StopIteration


def _not_utf8(cells: Sequence[str]) -> str:
    raw = ",".join(cells).encode("utf8", "surrogateescape")
    try:
        raw.decode("utf8")
    except UnicodeDecodeError as error:
        told = say("is not UTF-8")
        return join("; ", [told, say(GBK_REMEDY)]) if is_gbk(error.object) else told
    return "is not UTF-8"


def _csv_rows(source: Source, columns: Sequence[str], bad_rows: BadRows) -> Iterator[Row]:
    rows = _csv_lines(source, bad_rows)
    header = _header(next(rows)[1])
    places = [header.index(name) for name in columns]
    for number, cells in rows:
        if len(cells) != len(header):
            bad_rows.add(
                source.path,
                say("line {number}", number=number),
                f"has {counted(len(cells), 'cell')}, the header has {len(header)}",
            )
        elif not all(is_encodable(cells[place]) for place in places):
            bad_rows.add(source.path, say("line {number}", number=number), _not_utf8(cells))
        else:
            named = zip(columns, (cells[place] for place in places), strict=True)
            try:
                row = tuple(
                    _worded_cell(cell, name) if isinstance(name, (TurnsColumn, Table)) else cell for name, cell in named
                )
                check_stored(columns, row)
            except ValueError as error:
                bad_rows.add(source.path, say("line {number}", number=number), str(error))
            else:
                yield row
