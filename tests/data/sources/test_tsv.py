from __future__ import annotations

from pathlib import Path

from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import read_rows

COLUMNS = ("prompt", "response")


def test_a_quote_in_tsv_is_a_letter_and_swallows_no_row(tmp_path: Path) -> None:
    rows = [('"Stop', "he said"), ('"quoted"', 'a "" b'), ('5" wide', '"'), ("last", "row")]
    (tmp_path / "a.tsv").write_text("".join("\t".join(row) + "\n" for row in [COLUMNS, *rows]))
    read = read_rows(find(str(tmp_path / "a.tsv")), COLUMNS, BadRows())
    assert [row for batch in read for row in batch] == rows
