from __future__ import annotations

from pathlib import Path

import pytest

from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import column_names, read_rows

COLUMNS = ("prompt", "response")


def test_a_quote_in_tsv_is_a_letter_and_swallows_no_row(tmp_path: Path) -> None:
    rows = [('"Stop', "he said"), ('"quoted"', 'a "" b'), ('5" wide', '"'), ("last", "row")]
    (tmp_path / "a.tsv").write_text("".join("\t".join(row) + "\n" for row in [COLUMNS, *rows]))
    read = read_rows(find(str(tmp_path / "a.tsv")), COLUMNS, BadRows())
    assert [row for batch in read for row in batch] == rows


@pytest.mark.parametrize("sign", [";", "\t"])
def test_csv_without_a_comma_in_its_first_line_is_parted_as_that_line_is(tmp_path: Path, sign: str) -> None:
    """As spreadsheets write it where the comma is the decimal sign."""
    rows = [("1,5 or more", "yes, indeed"), (f"a{sign}b", 'with "quotes"\nand two lines'), ("last", "row")]
    lines = [sign.join(COLUMNS)] + [sign.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    for header in (lines[0], sign.join(f'"{name}"' for name in COLUMNS)):
        (tmp_path / "a.csv").write_text("\n".join([header, *lines[1:]]))
        source = find(str(tmp_path / "a.csv"))
        assert column_names(source[0]) == list(COLUMNS)
        assert [row for batch in read_rows(source, COLUMNS, BadRows()) for row in batch] == rows
