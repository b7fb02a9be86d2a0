"""How do sources become rows, in bounded memory, and what happens to a broken row?

Rows come in small batches of plain strings. Of plain text, a row is a paragraph (lines up to a blank one), or a line if
wanted; a paragraph longer than 16 KiB is parted at a line's end. A broken row stops with its file and number, or, with
`skip_bad_rows`, is counted. Nothing reads a file as a whole: 16 MB Parquet pages and 16 MiB lines are the largest
pieces.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data.lines import LONGEST_LINE_BYTES, BadRows, decoded_lines, not_utf8, numbered_lines, paragraphs
from data.sources import CSV, JSONL, TABLES, TEXT, TSV, Source
from data.tables import table_batches, table_columns
from settings import UserError

BATCH_ROWS = 256
DELIMITERS = {CSV: ",", TSV: "\t"}
Row = tuple[str, ...]


def column_names(source: Source, text_column: str = "text") -> list[str]:
    """List the columns of a file; plain text has the one named `text_column`.

    Raises:
        UserError: the file cannot be read.
    """
    if source.kind == TEXT:
        return [text_column]
    if source.kind in TABLES:
        return table_columns(source)
    if source.kind == JSONL:
        first = next(_objects(source, BadRows(skip=True)), None)
        if first is None:
            raise UserError(
                f'{source.path}: no line is a JSON object; write one object a line, such as {{"text": "..."}}'
            )
        return list(first[1])
    header = next(_csv_lines(source, BadRows()), (1, []))[1]
    return [name.encode("utf8", "replace").decode("utf8") for name in header]


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
        batches of 1 .. 256 rows, each a tuple of strings in the order of `columns`.
    Raises:
        UserError: a file is broken or lacks a column.
    Memory:
        one batch, and what its format needs to give it: a line, or a Parquet page of each wanted column.
    """
    sources = list(sources)
    for source in sources:  # all first: the last file's mistake should not show after hours
        _check_columns(source, columns)
    for source in sources:
        if source.kind in TABLES:
            yield from table_batches(source, columns, BATCH_ROWS, bad_rows.add)
        else:
            yield from _grouped(_text_rows(source, columns, bad_rows, text_unit))


def _check_columns(source: Source, columns: Sequence[str]) -> None:
    if source.kind == TEXT:
        if len(columns) > 1:
            raise UserError(
                f"{source.path}: plain text has no columns {', '.join(columns)}; use JSONL, CSV, Parquet or Arrow"
            )
        return
    names = column_names(source)
    problems = [
        f"{source.path}: column {name} {'stands there twice' if name in names else 'is missing'}; "
        f"columns: {', '.join(names)}; name yours with --text_column, or --prompt_column and --response_column"
        for name in columns
        if names.count(name) != 1
    ]
    if problems:
        raise UserError(*problems)


def _text_rows(source: Source, columns: Sequence[str], bad_rows: BadRows, text_unit: str) -> Iterator[Row]:
    if source.kind == JSONL:
        return _jsonl_rows(source, columns, bad_rows)
    if source.kind in DELIMITERS:
        return _csv_rows(source, columns, bad_rows)
    lines = decoded_lines(source, bad_rows)
    return ((text,) for text in (lines if text_unit == "line" else paragraphs(lines)))


def _grouped(rows: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _objects(source: Source, bad_rows: BadRows) -> Iterator[tuple[int, dict[str, Any]]]:
    too_long = 0
    for number, line in numbered_lines(source):
        if number == too_long or not line.strip():
            continue
        if len(line) >= LONGEST_LINE_BYTES:
            too_long = number
            bad_rows.add(source.path, f"line {number}", f"is longer than {LONGEST_LINE_BYTES // 1024**2} MiB")
            continue
        try:
            value = json.loads(line)
        except UnicodeDecodeError as error:
            bad_rows.add(source.path, f"line {number}", not_utf8(error))
        except (ValueError, RecursionError) as error:
            bad_rows.add(source.path, f"line {number}", f"is not JSON ({error})")
        else:
            if isinstance(value, dict):
                yield number, value
            else:
                bad_rows.add(source.path, f"line {number}", "is no JSON object; write one object a line")


def _jsonl_rows(source: Source, columns: Sequence[str], bad_rows: BadRows) -> Iterator[Row]:
    for number, value in _objects(source, bad_rows):
        problem = next((problem for name in columns if (problem := _cell_problem(value, name))), None)
        if problem is None:
            yield tuple(value[name] for name in columns)
        else:
            bad_rows.add(source.path, f"line {number}", problem)


def _cell_problem(value: dict[str, Any], name: str) -> str | None:
    if name not in value:
        return f"has no {name}; it has {', '.join(value) or 'nothing'}"
    cell = value[name]
    if not isinstance(cell, str):
        return f"{name} is {'null' if cell is None else type(cell).__name__}, not a text"
    return None if _encodable(cell) else f"{name} holds half of a surrogate pair"


def _encodable(text: str) -> bool:
    try:
        text.encode("utf8")
    except UnicodeEncodeError:
        return False
    return True


def _csv_lines(source: Source, bad_rows: BadRows) -> Iterator[tuple[int, list[str]]]:
    """Rows of cells with the number of their last line; bytes that are not UTF-8 come as surrogates."""
    text = (_csv_line(source, number, line) for number, line in numbered_lines(source))
    csv.field_size_limit(LONGEST_LINE_BYTES)
    reader = csv.reader(text, delimiter=DELIMITERS[source.kind], strict=True)
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad_rows.add(source.path, f"line {reader.line_num}", f"is not {source.kind.upper()} ({error})")
        else:
            if cells:
                yield reader.line_num, cells


def _csv_line(source: Source, number: int, line: bytes) -> str:
    if len(line) >= LONGEST_LINE_BYTES:
        raise UserError(
            f"{source.path}, line {number}: is longer than {LONGEST_LINE_BYTES // 1024**2} MiB; a quote may be missing"
        )
    return line.decode("utf8", "surrogateescape")


def _csv_rows(source: Source, columns: Sequence[str], bad_rows: BadRows) -> Iterator[Row]:
    rows = _csv_lines(source, bad_rows)
    header = next(rows)[1]
    places = [header.index(name) for name in columns]
    for number, cells in rows:
        if len(cells) != len(header):
            bad_rows.add(source.path, f"line {number}", f"has {len(cells)} cells, the header has {len(header)}")
        elif not all(_encodable(cells[place]) for place in places):
            bad_rows.add(source.path, f"line {number}", "is not UTF-8")
        else:
            yield tuple(cells[place] for place in places)
