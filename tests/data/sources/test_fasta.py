"""FASTA: records as they stand, labels and masks of other files by id, and what is wrong told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.sources.files import Source, find
from data.sources.lines import BadRows
from data.sources.reading import read_rows, records
from formats import FASTA
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


def test_labels_and_masks_come_by_id_in_any_order(tmp_path: Path) -> None:
    proteins = write(tmp_path / "a.fasta", ">P1\nMKV\n>P2\nACD\n>P3\nWW\n")
    labels = write(tmp_path / "l.fasta", ">P2\nHHH\n>other\nC\n>P1\nCEH\n")
    masks = write(tmp_path / "m.fasta", ">P1\n011\n>P2\n111\n>P3\n11\n")
    source = Source(proteins.path, FASTA, labels=(labels,), masks=(masks,))
    found = {record["id"]: record for _, record in records(source, [], BadRows())}
    assert (found["P1"]["label"], found["P1"]["mask"], found["P2"]["label"]) == ("CEH", "011", "HHH")
    assert isinstance(found["P3"]["label"], ValueError), "it has none"


@pytest.mark.parametrize(("text", "line"), [("MKV\n>P1\nMK\n", "line 1"), (">P1\nMK\n>P2\n\xff\n", "line 3")])
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "a.fasta"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(UserError, match=line):
        list(read_rows(find(str(path)), ["text"], BadRows()))
    bad_rows = BadRows(skip=True)
    assert list(read_rows(find(str(path)), ["text"], bad_rows)) == [[("MK",)]] and bad_rows.count == 1
