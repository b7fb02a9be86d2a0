"""A look at the beginning of files: their columns and first rows, about how many there are, and what a file is for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from data.sources.columns import Columns
from data.sources.files import find
from data.sources.formats import PARQUET, TEXT
from data.sources.lines import BadRows, up_to
from data.sources.reader import about_bytes, reader_of
from data.sources.reading import head_of, read_rows, reading, what_it_teaches
from data.sources.source import Source
from data.text.conversations import TextRow
from settings.declared import DataConfig
from settings.errors import UserError

# A token takes so many bytes of UTF-8, of English as of Chinese, with a vocabulary of some ten thousand tokens.
TOKEN_BYTES = 4
# No more files are looked at, and no more characters of each:
MOST_FILES = 16
MOST_CHARS = 512 * 1024
COUNTED_ROWS = 2000
SHOWN_ROWS = 8
SHOWN_LETTERS = 400
BARS = 24
LONGEST_SHARE = 0.98  # The few rows that are longer share the last bar, where they would press all others together.


@dataclass(frozen=True)
class Peek:
    """The first rows of files; those that are broken are left out, and counted.

    Args:
        sources, columns: the files, and what their rows are made of.
        max_rows: that count at all; None: all.
        is_all: whether there are no others.
    """

    sources: Sequence[Source]
    columns: Columns
    max_rows: int | None
    rows: list[TextRow]
    bad_rows: BadRows
    is_all: bool

    def about_rows(self) -> int:
        """About how many rows there are; raises UserError where a file cannot be read."""
        rows = about_rows(self.sources)
        return min(rows, self.max_rows or rows)


def peek(sources: Sequence[Source], columns: Columns | Sequence[str], most: int, max_rows: int | None = None) -> Peek:
    """Read the first rows of files, of each alike many.

    Args:
        most: rows that are given. max_rows: that count at all, of the first file on; None: all.
    Raises:
        UserError: a file cannot be read.
    Memory: up to 8 Mi characters.
    """
    # Where so many rows count from the first file on, files are one stream.
    groups = [[source] for source in _spread(sources)] if max_rows is None else [list(sources)]
    is_all = sum(map(len, groups)) == len(sources)
    rows = list[TextRow]()
    bad_rows = BadRows(skip=True)
    for group in groups:
        group_rows = islice(chain.from_iterable(read_rows(group, columns, bad_rows)), max_rows)
        rows += up_to(islice(group_rows, -(-most // len(groups))), MOST_CHARS, _letters)
        is_all = is_all and next(group_rows, None) is None
    return Peek(sources, Columns.of(columns), max_rows, rows, bad_rows, is_all)


def _spread(sources: Sequence[Source]) -> list[Source]:
    """Files from the first on, as far apart as `MOST_FILES` of them can be."""
    count = min(len(sources), MOST_FILES)
    return [sources[number * len(sources) // count] for number in range(count)]


def _letters(row: TextRow) -> int:
    return sum(map(len, row))


def about_rows(sources: Sequence[Source]) -> int:
    """Rows of all files, at least one: of Parquet files here as many as they say, of others by the bytes of some.

    Raises:
        UserError: a file cannot be read.
    """
    exact_rows = 0
    sampled = list[Source]()
    for source in sources:
        if source.kind == PARQUET and isinstance(source.path, Path):  # Each look at a file elsewhere costs a journey.
            exact_rows += _rows_of(source)
        else:
            sampled.append(source)
    some = _spread(sampled)
    rows = sum(map(_rows_of, some)) * sum(map(about_bytes, sampled)) // max(1, sum(map(about_bytes, some)))
    return max(1, exact_rows + rows)


def _rows_of(source: Source) -> int:
    with reading(source):
        rows: int = reader_of(source.kind).about_rows(source)
    return rows


def about_tokens(sources: Sequence[Source]) -> int:
    """Tokens of the texts of all files, if they hold little else, at least one."""
    return max(1, sum(map(about_bytes, sources)) // TOKEN_BYTES)


def preview(spec: str) -> dict[str, Any]:
    """Describe a file by its first rows, for the page. Lengths are in letters, as no tokenizer is chosen yet.

    Args:
        spec: as `--train_file`.
    Returns:
        `columns`, `task` (None where no column has a name that is known), `shown` columns, `rows` (the first ones),
        `counted` rows, `lengths` by column (median, longest, and bars of a histogram), `broken` rows.
    Raises:
        UserError: it cannot be read.
    Memory: the first `COUNTED_ROWS` rows.
    """
    source = find(spec)[0]
    data = DataConfig()
    names = [data.text_column] if source.kind == TEXT else list(head_of(source).names)
    task, columns = what_it_teaches(data, source)
    if columns is None:
        columns = Columns(tuple(name for name in names if _is_text(source, name)))
    titles = columns.cells()
    first = peek([source] if columns.kinds(names) else [], columns, COUNTED_ROWS)
    lengths = [[len(row[number]) for row in first.rows] for number in range(len(titles))]
    return {
        "file": str(source.path),
        "kind": source.kind,
        "columns": names,
        "task": task,
        "shown": titles,
        "rows": [[cell[:SHOWN_LETTERS] for cell in row] for row in first.rows[:SHOWN_ROWS]],
        "counted": len(first.rows),
        "is_whole": first.is_all,
        "broken": first.bad_rows.count,
        "lengths": dict(zip(titles, map(_lengths, lengths), strict=True)),
    }


def _is_text(source: Source, column: str) -> bool:
    try:
        return bool(peek([source], [column], 1).rows)
    except UserError:
        return False


def _lengths(lengths: list[int]) -> dict[str, Any]:
    if not lengths:
        return {"median": 0, "longest": 0, "bars": [], "bar": 1}
    ordered = sorted(lengths)
    most = ordered[int(LONGEST_SHARE * len(ordered))]
    bar = max(1, -(-most // BARS))
    bars = np.bincount(np.minimum(np.array(lengths) // bar, BARS - 1), minlength=BARS).tolist()
    return {"median": int(statistics.median(ordered)), "longest": ordered[-1], "bars": bars, "bar": bar}
