"""Lines that are typed in place of a file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.sources.files import sources_fingerprint
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from data.sources.typed import typed_lines


def test_typed_lines_are_read_like_a_file_of_text(tmp_path: Path) -> None:
    (source,) = typed_lines("true, false,也许")
    (tmp_path / "lines.txt").write_text("true\n\nfalse\n\n也许\n", encoding="utf8")
    assert str(source.path) == "true,false,也许"
    rows = [row for batch in read_rows([source], ["text"], BadRows()) for row in batch]
    assert "".join(text for (text,) in rows).split() == ["true", "false", "也许"]
    assert sources_fingerprint([source]) == sources_fingerprint(typed_lines("true,false,也许"))
    assert sources_fingerprint([source]) != sources_fingerprint(typed_lines("false,true,也许"))


@pytest.mark.parametrize(
    "spec", ["labels", "a.txt,b.txt", "a,b.jsonl.gz", "folder/a,b", "s3://x/a,b", "a*,b", "here,b"]
)
def test_what_may_name_a_file_is_no_line(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").write_text("x")
    assert typed_lines(spec) == []
