"""A look at the beginning of files: their first rows, about how many there are, and what a file is for."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np

from data.sources.files import TABLES, Source, find
from data.sources.layouts import Columns
from data.sources.lines import TEXT_PART_BYTES, BadRows, blocks
from data.sources.reading import head_of, read_rows, reading
from data.sources.tables import parquet_file
from data.task import what_it_teaches
from data.text.conversations import TextRow
from formats import FASTA, JSON, PARQUET, TEXT
from settings.declared import DataConfig
from settings.errors import UserError

PACKED = 4  # times smaller than what it holds, a packed text file
ROW_BYTES = 1024  # of an Arrow file, where nothing tells better
TOKEN_BYTES = 4  # of text in UTF-8, English as Chinese, with a vocabulary of some ten thousand tokens
MOST_FILES, MOST_CHARS = 16, 512 * 1024  # that are read, and of each
COUNTED_ROWS, SHOWN_ROWS, SHOWN_LETTERS = 2000, 8, 400
BARS = 24


@dataclass(frozen=True)
class Peek:
    """The first rows of files; those that are broken are left out, and counted.

    Args:
        is_all: whether there are no others.
    """

    rows: list[TextRow]
    bad_rows: BadRows
    is_all: bool


def peek(sources: Sequence[Source], columns: Columns | Sequence[str], most: int, max_rows: int | None = None) -> Peek:
    """Read the first rows of files, of each alike many.

    Args:
        most: rows that are given. max_rows: that count at all, of the first file on; None: all.
    Raises:
        UserError: a file cannot be read.
    Memory: up to 8 Mi characters.
    """
    rows, bad_rows, is_all = list[TextRow](), BadRows(skip=True), True
    chosen = [sources]
    if max_rows is None and len(sources) > 1:
        count = min(len(sources), MOST_FILES)
        chosen = [[sources[at * len(sources) // count]] for at in range(count)]
        is_all = count == len(sources)
    for part in chosen:
        coming = islice(chain.from_iterable(read_rows(part, columns, bad_rows)), max_rows)
        rows += _up_to(islice(coming, -(-most // len(chosen))), MOST_CHARS)
        is_all = is_all and next(coming, None) is None
    return Peek(rows, bad_rows, is_all)


def _up_to(rows: Iterator[TextRow], chars: int) -> Iterator[TextRow]:
    for row in rows:
        yield row
        chars -= sum(map(len, row))
        if chars <= 0:
            return


def about_rows(sources: Sequence[Source]) -> int:
    """Rows of all files, at least one.

    Raises:
        UserError: a file cannot be read.
    """
    return max(1, sum(map(_rows, sources)))


def about_tokens(sources: Sequence[Source]) -> int:
    """Tokens of the texts of all files, if they hold little else, at least one."""
    return max(1, sum(_bytes(source) for source in sources) // TOKEN_BYTES)


def _bytes(source: Source) -> int:
    return int(source.path.stat().st_size) * (PACKED if source.compression or source.kind == PARQUET else 1)


def _rows(source: Source) -> int:
    with reading(source):
        if source.kind == PARQUET:
            with parquet_file(source.path) as file:
                return int(file.metadata.num_rows)
        if source.kind in TABLES:
            return _bytes(source) // ROW_BYTES
        begin = next(iter(blocks(source)), b"")
    mark = b"\n"
    if source.kind == JSON:
        mark = json.dumps(head_of(source).names[0], ensure_ascii=False).encode("utf8", "replace") + b":"
    elif source.kind == FASTA:
        mark = b">"
    elif source.kind == TEXT and b"\n\n" in begin:
        mark = b"\n\n"
    found = max(1, begin.count(mark))
    return found if len(begin) < TEXT_PART_BYTES else found * _bytes(source) // len(begin)


def preview(spec: str) -> dict[str, Any]:
    """Describe a file by its first rows, for the page. Lengths are in letters, as no tokenizer is chosen yet.

    Args:
        spec: as `--train_file`.
    Returns:
        `columns`, `task` (None where no column has a name that is known), `shown` columns, `rows` (the first ones), `counted` rows,
        `lengths` by column (median, longest, and bars of a histogram), `broken` rows.
    Raises:
        UserError: it cannot be read.
    Memory: the first `COUNTED_ROWS` rows.
    """
    source, data = find(spec)[0], DataConfig()
    names = [data.text_column] if source.kind == TEXT else head_of(source).names
    match = what_it_teaches(data, source)
    texts = () if match else tuple(name for name in names if _is_text(source, name))
    wanted = match.columns if match else Columns(texts)
    found = peek([source] if wanted.kinds(names) else [], wanted, COUNTED_ROWS)
    return {
        "file": str(source.path), "kind": source.kind, "columns": names, "task": match and match.contents, "shown": wanted.cells(),
        "rows": [[cell[:SHOWN_LETTERS] for cell in row] for row in found.rows[:SHOWN_ROWS]],
        "counted": len(found.rows), "is_whole": found.is_all, "broken": found.bad_rows.count,
        "lengths": {name: _lengths([len(row[place]) for row in found.rows]) for place, name in enumerate(wanted.cells())},
    }  # fmt: skip


def _is_text(source: Source, column: str) -> bool:
    try:
        return bool(peek([source], [column], 1).rows)
    except UserError:
        return False


def _lengths(lengths: list[int]) -> dict[str, Any]:
    if not lengths:
        return {"median": 0, "longest": 0, "bars": [], "bar": 1}
    ordered = sorted(lengths)
    most = ordered[min(len(ordered) - 1, int(0.98 * len(ordered)))]  # the few longest would press all others together
    bar = max(1, -(-most // BARS))
    bars = np.bincount(np.minimum(np.array(lengths) // bar, BARS - 1), minlength=BARS).tolist()
    return {"median": int(statistics.median(ordered)), "longest": ordered[-1], "bars": bars, "bar": bar}
