"""About how many rows files hold, some of them, and what they are for, without reading them all."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources.files import find
from data.sources.peek import BARS, COUNTED_ROWS, about_rows, about_tokens, peek, preview
from settings.errors import UserError

ROWS = [{"prompt": f"question {at}", "response": "an answer " * (at % 40)} for at in range(9000)]


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    return str(path)


def test_rows_and_tokens_of_each_format(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(ROWS), encoding="utf8")
    jsonl(tmp_path / "a.jsonl", *ROWS)
    assert about_rows(find(str(tmp_path / "a.parquet"))) == 9000
    for name in ("a.json", "a.jsonl"):
        assert about_rows(find(str(tmp_path / name))) == pytest.approx(9000, rel=0.05)
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree", encoding="utf8")
    assert 1 <= about_rows(find(str(tmp_path / "a.txt"))) <= 3
    (tmp_path / "b.txt").write_text("word " * 4000, encoding="utf8")
    assert about_tokens(find(str(tmp_path / "b.txt"))) == 5000


def test_the_first_rows_of_each_file_are_given(tmp_path: Path) -> None:
    for part in ("a", "b"):
        rows = [{"prompt": f"{part}{at}", "response": "r"} for at in range(300)]
        jsonl(tmp_path / f"{part}.jsonl", *rows, "no row")
    sources, columns = find(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"), ["prompt", "response"]
    found = peek(sources, columns, 1000)
    assert (len(found.rows), found.is_all, found.bad_rows.count) == (600, True, 2)
    found = peek(sources, columns, 4)
    assert [prompt for prompt, _ in found.rows] == ["a0", "a1", "b0", "b1"] and not found.is_all
    found = peek(sources, columns, 100, max_rows=50)
    assert [prompt for prompt, _ in found.rows] == [f"a{at}" for at in range(50)] and found.is_all


@pytest.mark.parametrize(
    ("row", "task", "shown"),
    [
        ({"text": "a"}, "text", ["text"]),
        ({"prompt": "a", "response": "b", "n": 1}, "pairs", ["prompt", "response"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences", ["prompt", "chosen", "rejected"]),
        ({"messages": [{"role": "user", "content": "a"}]}, "conversations", ["messages"]),
        ({"question": "a", "n": 1}, None, ["question"]),
    ],
)
def test_what_a_file_teaches_follows_from_its_columns(
    tmp_path: Path, row: object, task: str | None, shown: list[str]
) -> None:
    found = preview(jsonl(tmp_path / "a.jsonl", row, row))
    assert (found["task"], found["shown"], found["counted"]) == (task, shown, 2)
    assert len(found["rows"]) == 2 and found["is_whole"]


def test_a_preview_counts_lengths_and_broken_rows(tmp_path: Path) -> None:
    found = preview(jsonl(tmp_path / "a.jsonl", {"text": 5}, *({"text": "字" * n} for n in range(1, 102))))
    lengths = found["lengths"]["text"]
    assert (lengths["median"], lengths["longest"], found["broken"]) == (51, 101, 1)
    assert len(lengths["bars"]) == BARS and sum(lengths["bars"]) == 101
    pq.write_table(pa.table({"text": ["a"] * (3 * COUNTED_ROWS)}), tmp_path / "a.parquet")
    found = preview(str(tmp_path / "a.parquet"))
    assert found["counted"] == COUNTED_ROWS and not found["is_whole"]
    with pytest.raises(UserError):
        preview(str(tmp_path / "none.jsonl"))
