"""About how many rows do files hold, and what are they like? Told in a moment, and not by reading it all.

Their number follows from facts of a file or its first MiB. Some of them come from places that are evenly spread over the
files, where their format lets a reader begin in the middle: the first rows are often unlike the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pyarrow as pa

from data.sources.files import TABLES, Source
from data.sources.layouts import Columns
from data.sources.lines import LONGEST_LINE_BYTES, TEXT_PART_BYTES, BadRows, blocks
from data.sources.reading import Row, all_names, column_names, read_rows
from data.sources.tables import open_parquet, some_batches
from formats import ARROW_FILE, ARROW_STREAM, JSON, JSONL, PARQUET, TEXT

PACKED = 4  # times smaller than what it holds, a packed text file
ROW_BYTES = 1024  # of an Arrow file, where nothing tells better
TOKEN_BYTES = 4  # of text in UTF-8, English as Chinese, with a vocabulary of some ten thousand tokens
WHOLE_BYTES = 4 * 1024**2  # of all files, up to which every row is read
PIECES, PIECE_BYTES = 16, 32 * 1024  # of a larger file that are read
MOST_FILES = 16  # of many that are read
EVERYWHERE, BEGINNING = "everywhere", "beginning"  # where a sample comes from
Item = TypeVar("Item")


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
    if source.kind == PARQUET:
        with open_parquet(source.path) as file:
            return int(file.metadata.num_rows)
    if source.kind in TABLES:
        return _bytes(source) // ROW_BYTES
    begin = next(iter(blocks(source)), b"")
    mark = b"\n"
    if source.kind == JSON:
        mark = json.dumps(column_names(source)[0], ensure_ascii=False).encode("utf8", "replace") + b":"
    elif source.kind == TEXT and b"\n\n" in begin:
        mark = b"\n\n"
    found = max(1, begin.count(mark))
    return found if len(begin) < TEXT_PART_BYTES else found * _bytes(source) // len(begin)


def some_rows(
    sources: Sequence[Source], columns: Columns | Sequence[str], most: int, max_rows: int | None = None
) -> tuple[list[Row], str, bool]:
    """Some rows of all files; those that are broken are left out.

    Args:
        most: rows that are given. max_rows: that count at all, from the first on; None: all.
    Returns:
        the rows, whether they come from everywhere or from the beginning of files, and whether these are all there are.
    Raises:
        UserError: a file cannot be read.
    Memory: up to 4 MiB of text; packed up to 16.
    """
    rows: list[Row] = []
    if sum(map(_bytes, sources)) <= WHOLE_BYTES:
        reading = chain.from_iterable(_readable(sources, columns))
        rows = list(_up_to(islice(reading, max_rows), PACKED * WHOLE_BYTES))
        is_whole = len(rows) == max_rows or next(reading, None) is None
        return _even(rows, most), EVERYWHERE if is_whole else BEGINNING, is_whole and len(rows) <= most
    where = EVERYWHERE if max_rows is None else BEGINNING
    chosen = _even(sources, MOST_FILES) if max_rows is None else sources[:1]
    for source in chosen:
        with TemporaryDirectory() as folder:
            part = _part(source, columns, Path(folder)) if where == EVERYWHERE else None
            where = where if part else BEGINNING
            share = islice(chain.from_iterable(_readable([part or source], columns)), None if part else most)
            found = list(_up_to(share, PIECES * PIECE_BYTES))
            rows += _even(found[:max_rows], -(-most // len(chosen)))
    return rows, where, False


def _readable(sources: Sequence[Source], columns: Columns | Sequence[str]) -> Iterator[list[Row]]:
    return read_rows(sources, columns, BadRows(skip=True))


def _up_to(rows: Iterator[Row], letters: int) -> Iterator[Row]:
    """Rows until they have so many letters."""
    for row in rows:
        yield row
        letters -= sum(map(len, row))
        if letters <= 0:
            return


def _even(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many, evenly spread."""
    return [items[at * len(items) // most] for at in range(most)] if len(items) > most else list(items)


def _part(source: Source, columns: Columns | Sequence[str], folder: Path) -> Source | None:
    """A small file with pieces from everywhere of a large one; None where its format or its place allows no reading from its middle."""
    if not isinstance(source.path, Path) or source.compression:
        return None
    if source.kind == JSONL:
        part = folder / "part.jsonl"
        with part.open("wb") as file:
            file.writelines(_pieces(source.path, _bytes(source)))
        return Source(part, JSONL)
    if source.kind not in TABLES or source.kind == ARROW_STREAM:
        return None
    wanted = list(Columns.of(columns).kinds(all_names(source)))
    batches = list(some_batches(source, wanted, PIECES, PIECE_BYTES // ROW_BYTES))
    if len(batches) < PIECES:
        return None
    part = folder / "part.arrow"
    with pa.ipc.new_file(str(part), batches[0].schema) as file:
        for batch in batches:
            file.write_batch(batch)
    return Source(part, ARROW_FILE)


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """Lines from evenly spread places."""
    with path.open("rb") as file:
        for number in range(PIECES):
            file.seek(number * size // PIECES)
            if number:
                file.readline(LONGEST_LINE_BYTES)  # which began before
            left = PIECE_BYTES
            while left > 0 and (line := file.readline(LONGEST_LINE_BYTES)):
                yield line if line.endswith(b"\n") else line + b"\n"
                left -= len(line)
