"""Plain text: a row is a paragraph, the lines up to a blank one. One longer than 16 Ki characters is split at a line's
end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from data.sources.lines import BadRows, Record, decoded_lines
from data.sources.reader import Head, Reader
from data.sources.source import Source

PARAGRAPH_CHARS = 16 * 1024


class PlainText(Reader):
    """A file without columns: its rows have one text, whatever that is called."""

    def head(self, source: Source) -> Head:
        return Head([], [], {})

    def records(
        self, source: Source, head: Head, columns: Sequence[str], bad_rows: BadRows
    ) -> Iterator[tuple[int, Record]]:
        (name,) = columns
        for number, paragraph in enumerate(paragraphs(decoded_lines(source, bad_rows)), 1):
            yield number, {name: paragraph}

    def row_mark(self, source: Source, begin: bytes) -> bytes:
        return b"\n\n" if b"\n\n" in begin else b"\n"


def paragraphs(lines: Iterator[str]) -> Iterator[str]:
    """Join lines up to a blank one, or up to 16 Ki characters."""
    paragraph: list[str] = []
    size = 0
    for line in chain(lines, [""]):
        is_blank = not line.strip()
        if is_blank or size + len(line) > PARAGRAPH_CHARS:
            if paragraph:
                yield "\n".join(paragraph)
            paragraph = []
            size = 0
        if not is_blank:
            paragraph.append(line)
            size += len(line) + 1
