"""What a reader of a format does: it looks at the beginning of a file, and gives its records one by one.

A record is column -> cell. In place of a cell that could not be read stands a ValueError that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from data.sources.formats import FORMATS, PARQUET
from data.sources.lines import TEXT_PART_BYTES, BadRows, Record, blocks
from data.sources.source import Source
from settings.program import full_name

PACKED = 4  # A packed text file is so many times smaller than what it holds.


@dataclass(frozen=True)
class Head:
    """What the beginning of a file says of its rows.

    Args:
        names: its columns, of objects those of the first; plain text has none.
        all_names: with those that only some of the first objects have, as where nothing is written for an empty text.
        sample: column -> a cell like the first that is not null: tables with their keys, lists with one entry, texts
            empty.
        types: column -> the name of its type, of tables alone.
        is_quoted: whether quotes around a cell are no part of it.
    """

    names: Sequence[str]
    all_names: Sequence[str]
    sample: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)
    is_quoted: bool = False


class Reader:
    """Reads the files of one format, in bounded memory. It has no state."""

    def head(self, source: Source) -> Head:
        """Look at the beginning of a file; may raise what a library raises."""
        raise NotImplementedError

    def records(
        self, source: Source, head: Head, columns: Sequence[str], bad_rows: BadRows
    ) -> Iterator[tuple[int, Record]]:
        """Read all records in order.

        Args:
            head: of the same file. columns: names that it has once each; others may come with them.
            bad_rows: told about each broken record.
        Returns:
            the number of each record or of its first line, from 1, and its cells.
        """
        raise NotImplementedError

    def row_mark(self, source: Source, begin: bytes) -> bytes:
        """What stands about once a row in the text of a file."""
        return b"\n"

    def about_rows(self, source: Source) -> int:
        """About how many rows a file has, by how many its first MiB has."""
        begin = next(iter(blocks(source)), b"")
        rows = max(1, begin.count(self.row_mark(source, begin)))
        if len(begin) < TEXT_PART_BYTES:
            return rows
        return rows * about_bytes(source) // len(begin)


def about_bytes(source: Source) -> int:
    """About how many bytes a file holds, unpacked."""
    is_packed = source.compression is not None or source.kind == PARQUET
    return int(source.path.stat().st_size) * (PACKED if is_packed else 1)


@cache
def reader_of(kind: str) -> Reader:
    """The reader of a format, a key of `formats.FORMATS`."""
    module, _, name = FORMATS[kind].reader.partition(":")
    reader: Reader = getattr(import_module(full_name(f"data.sources.{module}")), name)()
    return reader
