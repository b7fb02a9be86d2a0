"""FASTA: records as they stand, and what is wrong is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.sources.files import find
from data.sources.formats import FASTA
from data.sources.lines import BadRows
from data.sources.reading import read_rows, records
from data.sources.source import Source
from settings.errors import UserError


def write(path: Path, text: str) -> Source:
    path.write_text(text, encoding="utf8")
    (source,) = find(str(path))
    assert source.kind == FASTA
    return source


def test_records_are_read_whatever_their_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "a.fasta", ">P1 some protein\nMKV\n LL\n; a comment\n\n>P2\r\nacd\r\n>P3\n")
    found = [record for _, record in records(source, ["id", "text"], BadRows())]
    assert [(record["id"], record["text"]) for record in found] == [("P1", "MKVLL"), ("P2", "acd"), ("P3", "")]
    assert next(iter(read_rows([source], ["text"], BadRows())))[:2] == [("MKVLL",), ("acd",)]


@pytest.mark.parametrize(("text", "line"), [("MKV\n>P1\nMK\n", "line 1"), (">P1\nMK\n>P2\n\xff\n", "line 3")])
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "a.fasta"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(UserError, match=line):
        list(read_rows(find(str(path)), ["text"], BadRows()))
    bad_rows = BadRows(skip=True)
    assert list(read_rows(find(str(path)), ["text"], bad_rows)) == [[("MK",)]] and bad_rows.count == 1
