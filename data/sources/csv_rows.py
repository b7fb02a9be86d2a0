"""Records of CSV and TSV, however their cells are parted and quoted."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, dropwhile, islice
from typing import Any

from data.sources.lines import (
    LONGEST_LINE_BYTES,
    BadRows,
    Record,
    encoding_of,
    numbered_lines,
    too_long,
    up_to,
    whole_lines,
)
from data.sources.reader import Head, Reader
from data.sources.source import Source
from settings.errors import reason_of
from settings.fields import counted, is_encodable
from support.language import join, say

# A quoted cell of TSV is looked for in so much; from there on all cells that begin with a quote have to be such ones.
UNQUOTED_CHARS = 16 * 1024**2
QUOTED_CHARS = 1024**2
OTHER_DELIMITERS = ";\t"  # Spreadsheets write CSV with these where the comma is the decimal sign.


@dataclass(frozen=True)
class Dialect:
    """How the cells of a file are parted.

    Args:
        delimiter: between two cells. is_quoted: whether quotes around a cell are no part of it.
        lines_before: how many lines stand before the header.
    """

    delimiter: str
    is_quoted: bool = True
    lines_before: int = 0

    def reader(self, lines: Iterable[str]) -> Any:
        """As `csv.reader`, of these lines."""
        quoting: Any = csv.QUOTE_MINIMAL if self.is_quoted else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=self.delimiter, quoting=quoting, strict=True)


@dataclass(frozen=True)
class CsvHead(Head):
    """What the beginning of a file says of its rows, and how its cells are parted."""

    dialect: Dialect = Dialect(",")


class Csv(Reader):
    """A record a line, or more where a quoted cell has line breaks; the first one names the columns."""

    def head(self, source: Source) -> Head:
        dialect = self.dialect(source)
        _, _, cells = next(_rows(source, dialect, BadRows()), (1, 1, []))
        # Marks stand for what is not UTF-8 in the names.
        names = [name.encode("utf8", "replace").decode("utf8") for name in cells]
        return CsvHead(names, names, dict.fromkeys(names, ""), is_quoted=dialect.is_quoted, dialect=dialect)

    def dialect(self, source: Source) -> Dialect:
        """By commas, by what Excel's `sep=;` in a line before them says, or by what parts a first line that has no
        comma.
        """
        try:
            first = next(_Lines(source)).rstrip("\r\n").strip('"')
            header = next(csv.reader(_Lines(source)))
        except (csv.Error, _LineTooLong, StopIteration):
            return Dialect(",")
        if re.fullmatch("sep=.", first):
            return Dialect(first[-1], lines_before=1)
        other = next((sign for sign in OTHER_DELIMITERS if sign in "".join(header)), ",")
        return Dialect(other if len(header) == 1 else ",")

    def records(
        self, source: Source, head: Head, columns: Sequence[str], bad_rows: BadRows
    ) -> Iterator[tuple[int, Record]]:
        """The number of the first line and the wanted cells of each record."""
        assert isinstance(head, CsvHead)
        rows = _rows(source, head.dialect, bad_rows)
        next(rows)  # the header
        width = len(head.names)
        indices = {name: head.names.index(name) for name in columns}
        for number, last, cells in rows:
            if len(cells) != width:
                problem = say("has {cells}, the header has {count}", cells=counted(len(cells), "cell"), count=width)
                bad_rows.add(source, number, _with_end(problem, number, last))
                continue
            record = {name: cells[index] for name, index in indices.items()}
            if is_encodable("".join(record.values())):
                yield number, record
            else:
                raw = ",".join(cells).encode("utf8", "surrogateescape")
                bad_rows.add(source, number, join("; ", [say("is not UTF-8"), encoding_of(raw)]))


class Tsv(Csv):
    """Cells between tabs, where a quote is a letter like others (the media type text/tab-separated-values) unless cells
    are quoted as CSV writers do (pandas' to_csv(sep="\\t")): some cell begins with a quote within 16 MiB, and within 1
    MiB from there all such cells end as CSV has it.
    """

    def dialect(self, source: Source) -> Dialect:
        lines = (line.decode("utf8", "replace") for _, line in numbered_lines(source))
        header = next(lines, "")
        beginning = up_to(chain([header], lines), UNQUOTED_CHARS, len)
        from_first_quote = dropwhile(lambda line: '\t"' not in f"\t{line}", beginning)
        sample = list(up_to(from_first_quote, QUOTED_CHARS, len))
        dialect = Dialect("\t")
        records = dialect.reader(iter(sample))
        end = 0
        is_quoted = bool(sample)
        try:
            width = len(next(csv.reader([header], delimiter="\t"), []))
            for cells in records:
                is_quoted = is_quoted and len(cells) in (0, width)
                end = records.line_num
        except csv.Error:
            # The sample may end within a cell; that is no longer than what stands before it.
            is_cut = next(lines, None) is not None
            is_quoted = is_quoted and is_cut and records.line_num == len(sample) < 2 * end
        return replace(dialect, is_quoted=is_quoted)


class _LineTooLong(Exception):
    """A record of `LONGEST_LINE_BYTES` or more."""


class _Lines:
    """Lines for the CSV reader; `number` is that of the last one given.

    The line with which a record gets too long is raised, then passed; `size` is set back before each record.
    """

    def __init__(self, source: Source) -> None:
        self._lines = whole_lines(source)
        self.number = 0
        self.size = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        if line is None or self.size + len(line) >= LONGEST_LINE_BYTES:
            raise _LineTooLong(too_long())
        self.size += len(line)
        return line.decode("utf8", "surrogateescape")


def _rows(source: Source, dialect: Dialect, bad_rows: BadRows) -> Iterator[tuple[int, int, list[str]]]:
    """Cells with the numbers of their first and last line; bytes that are not UTF-8 come as surrogates."""
    csv.field_size_limit(LONGEST_LINE_BYTES)
    lines = _Lines(source)
    reader = dialect.reader(islice(lines, dialect.lines_before, None))
    while True:
        first = lines.number + 1
        try:
            lines.size = 0
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = say("is not {upper} ({error})", upper=source.kind.upper(), error=error)
            bad_rows.add(source, first, _with_end(problem, first, lines.number))
        except _LineTooLong as error:
            bad_rows.add(source, first, _with_end(reason_of(error), first, lines.number))
            reader = dialect.reader(lines)  # forgets an open quote
        else:
            if cells:
                yield first, lines.number, cells


def _with_end(problem: str, first: int, last: int) -> str:
    """What is wrong with a record, and where it ends if that is another line: then a quote may be the cause."""
    if last == first:
        return problem
    return say(
        "{problem}; the record continues to line {last}: a quote that opens here may not be closed",
        problem=problem,
        last=last,
    )
