"""How do sources become rows, in bounded memory, and what happens to a broken row?

Rows come in small batches of plain strings. Of plain text, a row is a paragraph (lines up to a blank one), or a line if
wanted; a paragraph longer than 16 KiB is split at a line's end. A broken row stops with its file and number, or, with
`skip_bad_rows`, is counted. Nothing reads a file as a whole: Parquet pages and 16 MiB lines are the largest pieces.
A longer line or text is a bad row; a longer paragraph is split.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from config import DataConfig
from data.sources.files import OBJECTS, TABLES, Source
from data.sources.json_rows import GLUED, objects
from data.sources.layouts import Columns, RowOf, recognised
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
from data.sources.tables import check_types, table_columns, table_rows, table_sample
from formats import CSV, TEXT, TSV
from language import join, say
from settings.errors import UserError
from settings.fields import counted, is_encodable, listed

BATCH_ROWS = 256
BATCH_CHARS = 1024**2
# of TSV a quote is a letter like others (the media type text/tab-separated-values), but where cells are quoted as CSV has it
DIALECTS: dict[str, dict[str, Any]] = {
    CSV: {"delimiter": ",", "strict": True},
    TSV: {"delimiter": "\t", "strict": True, "quoting": csv.QUOTE_NONE},
}
FIRST_BYTES = 4096  # of a file whose rows stand under a key
_WRAPPED = re.compile(r'"(data|rows|examples|train)"\s*:\s*\[\s*\{')
LOOKED_AT_OBJECTS = 256  # of a file, for columns that some lack
UNQUOTED_BYTES = 16 * 1024**2  # of TSV in which a quoted cell is looked for, and
QUOTED_BYTES = 1024**2  # from there on, in which all that begin with a quote have to be such cells
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
    first, second = next(found, None), next(found, None)
    told = bad_rows.examples[0] if bad_rows.examples else ""
    if first is None and any(hint in told for hint in (say(GBK_REMEDY), too_long(), crowded(), say(GLUED))):
        raise UserError(bad_rows.examples[0])
    if first is None:
        begin = next(iter(blocks(source)), b"").lstrip()
        hint = ""
        if begin[:1] == b"[" and source.compression:
            hint = "; an array is read unpacked alone: unpack the file"
        elif begin[:1] == b"{" and (wrapped := _WRAPPED.search(begin[:FIRST_BYTES].decode("utf8", "replace"))):
            raise UserError(_not_rows(source, wrapped[1], begin[:FIRST_BYTES].decode("utf8", "replace")))
        elif begin[:1] == b"{":
            hint = "; here an object goes on over lines"
        raise UserError(
            f'{source.path}: holds no JSON object; write one object a line, such as {{"text": "..."}}, or an array of them{hint}'
        )
    if second is None and (wrapped := _WRAPPED.search(json.dumps(first)[:FIRST_BYTES])):
        raise UserError(_not_rows(source, wrapped[1], json.dumps(first)[:FIRST_BYTES]))
    if second is None and _is_columns(first):
        raise UserError(
            f"{source.path}: holds whole columns, not rows; write an array of objects, or one object a line (pandas: "
            "to_json(FILE, orient='records', lines=True))"
        )
    chars = 0
    for value in islice(chain((value for value in (first, second) if value is not None), found), LOOKED_AT_OBJECTS):
        chars += sum(len(cell) for cell in value.values() if isinstance(cell, str))
        yield value
        if chars > BATCH_CHARS:
            return


def _not_rows(source: Source, key: str, begin: str) -> str:
    if '"paragraphs"' in begin:  # SQuAD's own files
        rows = f"[.{key}[].paragraphs[] | .context as $c | .qas[] | {{question, context: $c, answers: {{text: [.answers[].text]}}}}]"
        return f"{source.path}: its rows stand under {key}.paragraphs.qas; write them out (jq '{rows}' {source.path} > NEW.json)"
    return f"{source.path}: its rows stand under {key}; write that array alone (jq .{key} {source.path} > NEW.json)"


def _is_columns(value: dict[str, Any]) -> bool:
    """Whether an object holds columns, such as {"prompt": {"0": ...}, ...} or {"prompt": ["...", ...], ...}."""
    cells = list(value.values())
    if all(isinstance(cell, dict) and "0" in cell for cell in cells):
        return bool(cells)
    return len(cells) > 1 and all(
        isinstance(cell, list) and len(cell) == len(cells[0]) and all(isinstance(entry, str) for entry in cell)
        for cell in cells
    )


def recognised_columns(data: DataConfig, kind: str, source: Source) -> Columns | None:
    """The columns of pairs, preferences or prompts in a file, by the settings or a well-known shape; None where it has none.

    Raises:
        UserError: the file cannot be read.
    """
    return None if source.kind == TEXT else recognised(data, kind, column_names(source), _sample(source))


def _sample(source: Source) -> dict[str, Any]:
    """Column -> its first cell that is not null, or one of its type."""
    if source.kind in TABLES:
        return table_sample(source)
    if source.kind not in OBJECTS:
        return dict.fromkeys(column_names(source), "")
    found: dict[str, Any] = {}
    for value in _first_objects(source):
        found |= {name: cell for name, cell in value.items() if found.get(name) is None}
    return found


def read_rows(
    sources: Iterable[Source], columns: Columns | Sequence[str], bad_rows: BadRows, text_unit: str = "paragraph"
) -> Iterator[list[Row]]:
    """Read the wanted columns of all rows, in order.

    Args:
        sources: files, read one after the other.
        columns: what rows are made of, or names of text columns; plain text has one, whatever its name.
        bad_rows: told about each broken row.
        text_unit: "paragraph" or "line", the row of plain text.
    Returns:
        batches of 1 .. 256 rows and of about 1 Mi characters at most, each row a tuple of strings: the texts, and of columns with
        turns JSON of these.
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
    source: Source, columns: Columns | Sequence[str], bad_rows: BadRows, text_unit: str = "paragraph"
) -> Iterator[list[Row]]:
    """Read one file whose columns have been checked; the same file gives the same batches. See `read_rows`."""
    if source.kind == TEXT:
        lines = decoded_lines(source, bad_rows)
        return _grouped((text,) for text in (lines if text_unit == "line" else paragraphs(lines)))
    columns, names = Columns.of(columns), all_names(source)
    wanted, row_of = list(columns.kinds(names)), columns.row_of(names)
    if source.kind in TABLES:
        return table_rows(source, wanted, row_of, BATCH_ROWS, bad_rows.add)
    return _grouped(_rows(source, wanted, row_of, columns.cells(), bad_rows))


def _rows(
    source: Source, wanted: Sequence[str], row_of: RowOf, cells: Sequence[str], bad_rows: BadRows
) -> Iterator[Row]:
    for place, record in records(source, wanted, bad_rows):
        try:
            row = row_of(record)
            for name, text in zip(cells, row, strict=True):
                if not is_encodable(text):
                    raise ValueError(f"{name} holds half of a surrogate pair")
        except ValueError as error:
            bad_rows.add(source.path, place, str(error))
        else:
            yield row


def records(source: Source, wanted: Sequence[str], bad_rows: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the cells of each record of a file of objects or of CSV, of these at least the wanted ones."""
    return objects(source, bad_rows) if source.kind in OBJECTS else _csv_records(source, wanted, bad_rows)


def check_columns(sources: Iterable[Source], columns: Columns | Sequence[str]) -> None:
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


def _check_columns(source: Source, columns: Columns | Sequence[str]) -> None:
    columns = Columns.of(columns)
    if source.kind == TEXT:
        if len(columns.texts) != 1:
            raise UserError(
                f"{source.path}: plain text has no columns {', '.join(columns.cells())}; use JSONL, CSV, Parquet or Arrow"
            )
        return
    names = all_names(source)
    wanted = columns.kinds(names)
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


def _csv_lines(source: Source, bad_rows: BadRows) -> Iterator[tuple[int, list[str]]]:
    """Rows of cells with the number of their last line; bytes that are not UTF-8 come as surrogates."""
    csv.field_size_limit(LONGEST_LINE_BYTES)
    lines, (dialect, is_named) = _CsvLines(source), _dialect(source)
    reader = csv.reader(lines, **dialect)
    if is_named:
        next(lines)
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
            hint = join("; ", [told, say("a quote may be missing")]) if "quoting" not in dialect else told
            bad_rows.add(source.path, f"line {lines.number}", hint)
            reader = csv.reader(lines, **dialect)  # forgets an open quote
        else:
            if cells:
                yield lines.number, cells


def _dialect(source: Source) -> tuple[dict[str, Any], bool]:
    """How cells are parted, and whether the first line does nothing but say so, as Excel's `sep=;`.

    By commas, or by what parts the first line of a CSV file that has none; of TSV by tabs.
    """
    dialect = DIALECTS[source.kind]
    if source.kind == TSV:
        return ({"delimiter": "\t", "strict": True} if is_quoted(source) else dialect), False
    with suppress(csv.Error, _LineTooLong, StopIteration):
        first = next(_CsvLines(source)).rstrip("\r\n").strip('"')
        if first.startswith("sep=") and len(first) == len("sep=;"):
            return {**dialect, "delimiter": first[-1]}, True
        header = next(csv.reader(_CsvLines(source), delimiter=","))
        if len(header) == 1 and (found := [sign for sign in OTHER_DELIMITERS if sign in header[0]]):
            return {**dialect, "delimiter": found[0]}, False
    return dialect, False


def is_quoted(source: Source) -> bool:
    """Whether the cells of a TSV file are quoted where they have to be, as csv writers do (pandas' to_csv(sep="\\t")).

    They are if a cell begins with a quote within 16 MiB, and within 1 MiB from there all such cells end as CSV has it.
    """
    if source.kind != TSV:
        return False
    header, sample, size, looked_at = "", list[str](), 0, 0
    for _, line in numbered_lines(source):
        header = header or line.decode("utf8", "replace")
        if sample or line.startswith(b'"') or b'\t"' in line:
            sample.append(line.decode("utf8", "replace"))
            size += len(line)
        looked_at += len(line)
        if size > QUOTED_BYTES or (not sample and looked_at > UNQUOTED_BYTES):
            break
    reader, ends = csv.reader(sample, delimiter="\t", strict=True), 0
    try:
        width = len(next(csv.reader([header], delimiter="\t"), []))
        for cells in reader:
            if cells and len(cells) != width:
                return False
            ends = reader.line_num
    except csv.Error:  # in the last cell, of which the sample has the beginning
        return reader.line_num == len(sample) < 2 * ends and size > QUOTED_BYTES
    return bool(sample)


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


def _csv_records(source: Source, wanted: Sequence[str], bad_rows: BadRows) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = _csv_lines(source, bad_rows)
    header = _header(next(rows)[1])
    places = [(name, header.index(name)) for name in wanted]
    for number, cells in rows:
        place = say("line {number}", number=number)
        if len(cells) != len(header):
            told = f"has {counted(len(cells), 'cell')}, the header has {len(header)}"
            bad_rows.add(source.path, place, told)
        elif not all(is_encodable(cells[at]) for _, at in places):
            bad_rows.add(source.path, place, _not_utf8(cells))
        else:
            yield place, {name: cells[at] for name, at in places}
