"""How is a long reading taken up again where an earlier one stopped?

A reading comes in chunks, each with its place: which file, how many batches of it. The same files give the same chunks,
so a place is enough to continue from; what was read of that file before is read again and passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.sources.files import Source
from data.sources.layouts import Columns
from data.sources.lines import BadRows
from data.sources.reading import Row, read_source


@dataclass
class Point:
    """How far one pass through sources has come.

    Args:
        source: number of the file; batch: batches of it that are done; read: rows read over all files.
        usable: examples that were neither broken, blank nor dropped; kept: rows of which one is no duplicate.
        bad: broken rows before this file.
    """

    source: int = 0
    batch: int = 0
    read: int = 0
    usable: int = 0
    kept: int = 0
    bad: dict[str, Any] = field(default_factory=lambda: {"count": 0, "examples": []})


@dataclass(frozen=True)
class Chunk:
    """A batch of rows and its place in the sources; the fields are those of the `Point` after it."""

    rows: list[Row]
    source: int
    batch: int
    read: int
    bad: dict[str, Any]

    def move(self, point: Point) -> None:
        """Set a point after this chunk."""
        point.source, point.batch, point.read, point.bad = self.source, self.batch, self.read, self.bad


def chunks(
    sources: Sequence[Source], columns: Columns | Sequence[str], bad_rows: BadRows, max_rows: int | None, start: Point
) -> Iterator[Chunk]:
    """Read sources from a point on.

    Args:
        bad_rows: told about broken rows; at the end it has counted all of them, those before the point included.
        max_rows: rows to read at most, over all files and attempts; None: all.
    """
    bad_rows.count, bad_rows.examples = int(start.bad["count"]), list(start.bad["examples"])
    read, done = start.read, start.batch
    for number in range(start.source, len(sources)):
        before = {"count": bad_rows.count, "examples": list(bad_rows.examples)}
        for batch, rows in enumerate(read_source(sources[number], columns, bad_rows)):
            if batch < done:
                continue
            if max_rows is not None and read + len(rows) >= max_rows:
                if max_rows > read:
                    yield Chunk(rows[: max_rows - read], number, batch + 1, max_rows, before)
                return
            read += len(rows)
            yield Chunk(rows, number, batch + 1, read, before)
        done = 0
