"""Records of FASTA: a line `>id description`, then a sequence in any number of lines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from data.sources.files import Source
from data.sources.lines import LONGEST_LINE_BYTES, BadRows, Record, not_utf8, numbered_lines, place_of, too_long
from language import say

FASTA_COLUMNS = ID, SEQUENCE = "id", "text"


def fasta_records(source: Source, bad_rows: BadRows) -> Iterator[tuple[int, Record]]:
    """The line on which each record begins, and its cells. Memory: one record."""
    begun = 0
    name = ""
    parts = list[str]()
    size = 0
    problem = ""
    # A last line of its own ends the last record as another record would.
    for number, line in chain(numbered_lines(source), [(0, b">")]):
        try:
            text = line.decode("utf8").strip()
        except UnicodeDecodeError as error:
            text = ""
            problem = problem or not_utf8(error)
        if text.startswith(";"):  # a comment
            continue
        if text.startswith(">"):
            if begun and problem:
                bad_rows.add(source.path, place_of(source, begun), problem)
            elif begun:
                yield begun, {ID: name, SEQUENCE: "".join(parts)}
            begun = number
            name = (text[1:].split() or [""])[0]
            parts = []
            size = 0
            problem = ""
        elif text and not begun:
            bad_rows.add(source.path, place_of(source, number), say("stands before the first line with >"))
        elif text:
            size += len(text)
            if size >= LONGEST_LINE_BYTES:
                problem = too_long()
                text = ""
            parts.append("".join(text.split()))
