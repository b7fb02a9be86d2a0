"""About how many rows files hold, some of them, and what they are for, without reading them all."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources.files import find
from data.sources.formats import FORMATS, KIND_BY_SUFFIX
from data.sources.peek import BARS, COUNTED_ROWS, about_rows, about_tokens, peek, preview
from data.sources.reader import Reader, reader_of
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


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
# the columns of a file, what it teaches, and the cells of its rows
TAUGHT = [
    ("text", "text", "text"),
    ("prompt response n", "pairs", "prompt response"),
    ("prompt response text messages", "pairs", "prompt response"),
    ("prompt chosen rejected text messages", "preferences", "prompt chosen rejected"),
    ("conversations chosen rejected", "preferences", "prompt chosen rejected conversations"),
    ("messages text", "conversations", "messages"),
    ("conversations system", "conversations", "conversations"),
    ("text chosen rejected", "text", "text"),
    ("text source target", "text", "text"),
    ("instruction input chosen rejected", "preferences", "instruction+input chosen rejected"),
    ("question answer chosen rejected", "preferences", "question chosen rejected"),
    ("query chosen rejected", "preferences", "query chosen rejected"),
    ("input output chosen rejected", "preferences", "input chosen rejected"),
    ("chosen rejected", "preferences", "prompt chosen rejected turns"),
    ("instruction input output", "pairs", "instruction+input output"),
    ("instruction context response", "pairs", "instruction+context response"),
    ("question answers context", "pairs", "question+context answers.text"),
    ("question answer", "pairs", "question answer"),
    ("query response", "pairs", "query response"),
    ("prefix input_text target_text", "pairs", "prefix: input_text target_text"),
    ("input_text target_text", "pairs", "input_text target_text"),
    ("prompt completion", "pairs", "prompt completion"),
    ("source target", "pairs", "source target"),
    ("document summary", "pairs", "document summary"),
    ("article highlights", "pairs", "article highlights"),
    ("dialogue summary", "pairs", "dialogue summary"),
    ("input output", "pairs", "input output"),
    ("translation", "pairs", "translation.en translation.zh"),
    ("question n", None, "question"),
]
CELLS: dict[str, object] = {
    "messages": TURNS,
    "conversations": TURNS[:1],
    "answers": {"text": ["a"]},
    "translation": {"en": "a", "zh": "b"},
    "n": 1,
}
SPOKEN = {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "c"}]}


@pytest.mark.parametrize(("columns", "task", "cells"), TAUGHT)
def test_what_a_file_teaches_follows_from_its_columns(
    tmp_path: Path, columns: str, task: str | None, cells: str
) -> None:
    answers = SPOKEN if columns == "chosen rejected" else {}
    row = {name: answers.get(name, CELLS.get(name, "a")) for name in columns.split()}
    row |= {"rejected": "b"} if row.get("rejected") == "a" else {}
    found = preview(jsonl(tmp_path / "a.jsonl", row, row))
    assert (found["task"], " ".join(found["shown"]), found["counted"]) == (task, cells, 2)
    assert len(found["rows"]) == 2 and found["is_whole"]


def test_each_format_of_the_table_has_its_reader() -> None:
    assert all(isinstance(reader_of(kind), Reader) for kind in FORMATS)
    assert all(KIND_BY_SUFFIX[ending] == kind for kind, entry in FORMATS.items() for ending in entry.endings)


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
