"""FASTA: a line `>id description`, then a sequence in any number of lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from data.sources.lines import LONGEST_LINE_BYTES, BadRows, Record, not_utf8, numbered_lines, too_long
from data.sources.reader import Head, Reader
from data.sources.source import Source
from support.language import say

ID = "id"
SEQUENCE = "text"
_NAME = re.compile(r">\s*(\S*)")


class Fasta(Reader):
    """A record is the name of a sequence, and its letters."""

    def head(self, source: Source) -> Head:
        names = [ID, SEQUENCE]
        return Head(names, names, dict.fromkeys(names, ""))

    def records(
        self, source: Source, head: Head, columns: Sequence[str], bad_rows: BadRows
    ) -> Iterator[tuple[int, Record]]:
        """The line on which each record begins, and its cells. Memory: one record."""
        for number, lines in _records(source):
            try:
                title, *parts = [line.decode("utf8") for line in lines]
            except UnicodeDecodeError as error:
                bad_rows.add(source, number, not_utf8(error))
                continue
            name = _NAME.match(title)
            if name is None:
                bad_rows.add(source, number, say("stands before the first line with >"))
            elif sum(map(len, lines)) >= LONGEST_LINE_BYTES:
                bad_rows.add(source, number, too_long())
            else:
                yield number, {ID: name[1], SEQUENCE: "".join("".join(parts).split())}

    def row_mark(self, source: Source, begin: bytes) -> bytes:
        return b">"


def _records(source: Source) -> Iterator[tuple[int, list[bytes]]]:
    """The number of the first line of each record, and its lines without blank ones and comments, up to about 16 MiB of
    them.
    """
    begin = 0
    lines = list[bytes]()
    size = 0
    for number, line in numbered_lines(source):
        text = line.strip()
        if text[:1] in (b"", b";"):
            continue
        if lines and text.startswith(b">"):
            yield begin, lines
            lines = []
            size = 0
        begin = begin if lines else number
        if size < LONGEST_LINE_BYTES:
            lines.append(text)
            size += len(text)
    if lines:
        yield begin, lines
