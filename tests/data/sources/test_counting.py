"""About as many rows as there are, without reading them all."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources.counting import about_rows, about_tokens
from data.sources.files import find

ROWS = [{"prompt": f"question {at}", "response": "an answer " * (at % 40)} for at in range(9000)]


def test_rows_of_each_format(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(ROWS), encoding="utf8")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf8")
    assert about_rows(find(str(tmp_path / "a.parquet"))) == 9000
    for name in ("a.json", "a.jsonl"):
        assert about_rows(find(str(tmp_path / name))) == pytest.approx(9000, rel=0.05)


def test_small_files_and_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree", encoding="utf8")
    assert 1 <= about_rows(find(str(tmp_path / "a.txt"))) <= 3
    (tmp_path / "b.txt").write_text("word " * 4000, encoding="utf8")
    assert about_tokens(find(str(tmp_path / "b.txt"))) == 5000
