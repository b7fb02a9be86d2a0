"""Records of FASTA: a line `>id description`, then a sequence in any number of lines.

The labels of residues, and masks of them, may stand in further files of the same ids: `--label_file`, `--mask_file`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from data.sources.files import Source
from data.sources.lines import LONGEST_LINE_BYTES, BadRows, Record, not_utf8, numbered_lines, place_of, too_long
from language import say
from settings.fields import listed

ID, SEQUENCE, LABEL, MASK = "id", "text", "label", "mask"  # columns


def fasta_columns(source: Source) -> list[str]:
    """The columns of a file's records."""
    return [ID, SEQUENCE, *[LABEL] * bool(source.labels), *[MASK] * bool(source.masks)]


def fasta_records(source: Source, bad_rows: BadRows) -> Iterator[tuple[int, Record]]:
    """The line on which each record begins, and its cells.

    Memory: one record; of label files that are in another order, the records that were passed.
    """
    beside = {
        column: _ById(files, bad_rows) for column, files in ((LABEL, source.labels), (MASK, source.masks)) if files
    }
    for number, name, sequence in _entries(source, bad_rows):
        yield number, {ID: name, SEQUENCE: sequence, **{column: by_id.take(name) for column, by_id in beside.items()}}


def _entries(source: Source, bad_rows: BadRows) -> Iterator[tuple[int, str, str]]:
    """Line, id and sequence of each record that can be read."""
    begun, name, parts, size, problem = 0, "", list[str](), 0, ""
    for number, line in chain(numbered_lines(source), [(0, b">")]):  # behind the last record as before another
        try:
            text = line.decode("utf8").strip()
        except UnicodeDecodeError as error:
            text, problem = "", problem or not_utf8(error)
        if text.startswith(";"):  # a comment
            continue
        if text.startswith(">"):
            if begun and not problem:
                yield begun, name, "".join(parts)
            elif begun:
                bad_rows.add(source.path, place_of(source, begun), problem)
            begun, name, parts, size, problem = number, (text[1:].split() or [""])[0], [], 0, ""
        elif text and not begun:
            bad_rows.add(source.path, place_of(source, number), say("stands before the first line with >"))
        elif text:
            size += len(text)
            if size >= LONGEST_LINE_BYTES:
                problem, text = too_long(), ""
            parts.append("".join(text.split()))


class _ById:
    """Records of files by id. They are read as far as is asked for, so that files in the same order take no memory."""

    def __init__(self, sources: Sequence[Source], bad_rows: BadRows) -> None:
        self._files = listed(source.path for source in sources)
        self._coming = (entry for source in sources for entry in _entries(source, bad_rows))
        self._passed: dict[str, str] = {}

    def take(self, name: str) -> str | ValueError:
        if name in self._passed:
            return self._passed.pop(name)
        for _, other, content in self._coming:
            if other == name:
                return content
            self._passed[other] = content
        return ValueError(say("of {name} is missing in {files}", name=name, files=self._files))
