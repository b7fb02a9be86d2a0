"""About how many rows files hold, some of them, and what they are for, without reading them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.sources.files import find
from data.sources.formats import FORMATS, KIND_BY_SUFFIX
from data.sources.peek import BARS, COUNTED_ROWS, about_rows, about_tokens, peek, preview
from data.sources.reader import Reader, reader_of
from settings.errors import UserError
from tests.data.sources.rows import write_rows

ROWS = [{"prompt": f"question {at}", "response": "an answer " * (at % 40)} for at in range(2000)]


def test_rows_and_tokens_of_each_format(tmp_path: Path) -> None:
    for ending, tolerance in (("parquet", 0.0), ("json", 0.05), ("jsonl", 0.05)):
        path = write_rows(tmp_path / f"a.{ending}", ROWS)
        assert about_rows(find(str(path))) == pytest.approx(2000, rel=tolerance)
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    assert 1 <= about_rows(find(str(tmp_path / "a.txt"))) <= 3
    (tmp_path / "b.txt").write_text("word " * 4000)
    assert about_tokens(find(str(tmp_path / "b.txt"))) == 5000


def test_the_first_rows_of_each_file_are_given(tmp_path: Path) -> None:
    for part in ("a", "b"):
        rows: list[Any] = [{"prompt": f"{part}{at}", "response": "r"} for at in range(300)]
        write_rows(tmp_path / f"{part}.jsonl", [*rows, "no row"])
    sources = find(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")
    columns = ["prompt", "response"]
    every = peek(sources, columns, 1000)
    assert (len(every.rows), every.is_all, every.bad_rows.count) == (600, True, 2)
    four = peek(sources, columns, 4)
    assert [prompt for prompt, _ in four.rows] == ["a0", "a1", "b0", "b1"]
    assert not four.is_all
    bounded = peek(sources, columns, 100, max_rows=50)
    assert [prompt for prompt, _ in bounded.rows] == [f"a{at}" for at in range(50)]
    assert bounded.is_all


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
    page = preview(str(write_rows(tmp_path / "a.jsonl", [row, row])))
    assert (page["task"], " ".join(page["shown"]), page["counted"]) == (task, cells, 2)
    assert len(page["rows"]) == 2
    assert page["is_whole"]


def test_each_format_of_the_table_has_its_reader() -> None:
    assert all(isinstance(reader_of(kind), Reader) for kind in FORMATS)
    assert all(KIND_BY_SUFFIX[ending] == kind for kind, entry in FORMATS.items() for ending in entry.endings)


def test_a_preview_counts_lengths_and_broken_rows(tmp_path: Path) -> None:
    rows = [{"text": 5}, *({"text": "字" * n} for n in range(1, 102))]
    page = preview(str(write_rows(tmp_path / "a.jsonl", rows)))
    lengths = page["lengths"]["text"]
    assert (lengths["median"], lengths["longest"], page["broken"]) == (51, 101, 1)
    assert len(lengths["bars"]) == BARS
    assert sum(lengths["bars"]) == 101
    page = preview(str(write_rows(tmp_path / "a.parquet", [{"text": "a"}] * (3 * COUNTED_ROWS))))
    assert page["counted"] == COUNTED_ROWS
    assert not page["is_whole"]
    with pytest.raises(UserError):
        preview(str(tmp_path / "none.jsonl"))
