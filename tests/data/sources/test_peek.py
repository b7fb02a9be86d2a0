"""About how many rows files hold, some of them, and what they are for, without reading them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.sources.peek import preview
from tests.data.sources.rows import write_rows

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
# the columns of a file, what it teaches, and the cells of its rows; further layouts stand in `PAIRS` of test_layouts.py
TAUGHT = [
    ("text", "text", "text"),
    ("prompt response text messages", "pairs", "prompt response"),
    ("prompt chosen rejected text messages", "preferences", "prompt chosen rejected"),
    ("conversations chosen rejected", "preferences", "prompt chosen rejected conversations"),
    ("messages text", "conversations", "messages"),
    ("text source target", "text", "text"),
    ("query chosen rejected", "preferences", "query chosen rejected"),
    ("chosen rejected", "preferences", "prompt chosen rejected turns"),
    ("question answers context", "pairs", "question+context answers.text"),
    ("question answer", "pairs", "question answer"),
    ("input_text target_text", "pairs", "input_text target_text"),
    ("source target", "pairs", "source target"),
    ("document summary", "pairs", "document summary"),
    ("article highlights", "pairs", "article highlights"),
    ("dialogue summary", "pairs", "dialogue summary"),
    ("input output", "pairs", "input output"),
    ("query document label", "pairs", "query, document label"),
    ("query pos neg", "pairs", "query, pos, neg pos, neg"),
    ("question n", None, "question"),
]
CELLS: dict[str, object] = {
    "messages": TURNS,
    "conversations": TURNS[:1],
    "answers": {"text": ["a"]},
    "n": 1,
    "label": 1,
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
