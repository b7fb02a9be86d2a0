"""Records of CSV and TSV, however their cells are parted and quoted."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from data.sources.files import Source
from data.sources.lines import (
    LONGEST_LINE_BYTES,
    BadRows,
    Record,
    encoding_of,
    numbered_lines,
    place_of,
    too_long,
)
from formats import TSV
from language import join, say
from settings.errors import reason_of
from settings.fields import counted, is_encodable

UNQUOTED_BYTES = 16 * 1024**2  # of TSV in which a quoted cell is looked for, and
QUOTED_BYTES = 1024**2  # from there on, in which all that begin with a quote have to be such cells
OTHER_DELIMITERS = ";\t"  # of CSV as spreadsheets write it where the comma is the decimal sign
Dialect = tuple[dict[str, Any], int]  # what `csv.reader` takes, and how many lines stand before the header


def dialect_of(source: Source) -> Dialect:
    """How the cells of a file are parted.

    By commas, by what Excel's `sep=;` in a line before them says, or by what parts the first line of a CSV file that has no comma;
    of TSV by tabs, where a quote is a letter like others (the media type text/tab-separated-values) unless cells are quoted as in CSV.
    """
    if source.kind == TSV:
        return {"delimiter": "\t", "strict": True, **({} if _is_quoted(source) else {"quoting": csv.QUOTE_NONE})}, 0
    with suppress(csv.Error, _LineTooLong, StopIteration):
        first = next(_Lines(source)).rstrip("\r\n").strip('"')
        if first.startswith("sep=") and len(first) == len("sep=;"):
            return {"delimiter": first[-1], "strict": True}, 1
        header = next(csv.reader(_Lines(source), delimiter=","))
        if len(header) == 1 and (found := [sign for sign in OTHER_DELIMITERS if sign in header[0]]):
            return {"delimiter": found[0], "strict": True}, 0
    return {"delimiter": ",", "strict": True}, 0


def _is_quoted(source: Source) -> bool:
    """Whether the cells of a TSV file are quoted where they have to be, as csv writers do (pandas' to_csv(sep="\\t")).

    They are if a cell begins with a quote within 16 MiB, and within 1 MiB from there all such cells end as CSV has it.
    """
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
    """A record of `LONGEST_LINE_BYTES` or more."""


class _Lines:
    """Lines for the CSV reader; `number` is that of the last one given.

    The line with which a record gets too long is raised, then passed; `size` is set back before each record.
    """

    def __init__(self, source: Source) -> None:
        self._lines = numbered_lines(source)
        self._too_long = self.number = self.size = 0

    def __iter__(self) -> _Lines:
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
            return line.decode("utf8", "surrogateescape")
        raise StopIteration


def _rows(source: Source, dialect: Dialect, bad_rows: BadRows) -> Iterator[tuple[int, int, list[str]]]:
    """Cells with the numbers of their first and last line; bytes that are not UTF-8 come as surrogates."""
    csv.field_size_limit(LONGEST_LINE_BYTES)
    lines, (options, before) = _Lines(source), dialect
    reader = csv.reader(lines, **options)
    for _ in range(before):
        next(lines)
    while True:
        first = lines.number + 1
        try:
            lines.size = 0
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = say("is not {upper} ({error})", upper=source.kind.upper(), error=error)
            bad_rows.add(source.path, place_of(source, first), _with_end(problem, first, lines.number))
        except _LineTooLong as error:
            bad_rows.add(source.path, place_of(source, first), _with_end(reason_of(error), first, lines.number))
            reader = csv.reader(lines, **options)  # forgets an open quote
        else:
            if cells:
                yield first, lines.number, cells


def _with_end(problem: str, first: int, last: int) -> str:
    """What is wrong with a record, and where it ends if that is another line: then a quote may be the cause."""
    if last == first:
        return problem
    text = "{problem}; the record goes on to line {last}: a quote that opens here may lack its end"
    return say(text, problem=problem, last=last)


def csv_header(source: Source, dialect: Dialect) -> list[str]:
    """The names of columns, with marks for what is not UTF-8 in them."""
    return _names(next(_rows(source, dialect, BadRows()), (1, 1, list[str]()))[2])


def _names(cells: Sequence[str]) -> list[str]:
    return [name.encode("utf8", "replace").decode("utf8") for name in cells]


def csv_records(
    source: Source, dialect: Dialect, wanted: Sequence[str], bad_rows: BadRows
) -> Iterator[tuple[int, Record]]:
    """The number of the first line and the wanted cells of each record."""
    rows = _rows(source, dialect, bad_rows)
    header = _names(next(rows)[2])
    places = [(name, header.index(name)) for name in wanted]
    for number, last, cells in rows:
        if len(cells) != len(header):
            problem = say("has {cells}, the header has {count}", cells=counted(len(cells), "cell"), count=len(header))
            bad_rows.add(source.path, place_of(source, number), _with_end(problem, number, last))
        elif not all(is_encodable(cells[at]) for _, at in places):
            raw = ",".join(cells).encode("utf8", "surrogateescape")
            bad_rows.add(source.path, place_of(source, number), join("; ", [say("is not UTF-8"), encoding_of(raw)]))
        else:
            yield number, {name: cells[at] for name, at in places}
