"""Files as their documents have them, without a flag: what is learnt of a row, and which columns are not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.prepare.unread import passed_over
from data.sources.lines import BadRows
from data.sources.prompts import read_prompts
from data.text.templates import Template
from settings.errors import UserError
from tests.data.sources.rows import Row, examples_of, write_rows


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def bot(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


BEFORE = {"system": "s", "history": [["q1", "a1"]]}
TALK = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]
# a row, flags, the encoder's text, the response, columns that are not used
PAIRS: list[tuple[Row, dict[str, str], str, str, str]] = [
    ({"instruction": "i", "input": "x", "output": "o", **BEFORE}, {}, "s\nq1\na1\ni\nx", "o", ""),  # LLaMA-Factory
    ({"instruction": "i", "input": "", "output": "o", "system": "", "history": []}, {}, "i", "o", ""),
    ({"instruction": "i", "output": "o", "text": "t"}, {"is_finetune": "True"}, "i", "o", "text"),  # Stanford's Alpaca
    ({"instruction": "i", "context": "c", "response": "r", "category": "k"}, {}, "i\nc", "r", "category"),  # Dolly
    ({"query": "q", "response": "r", **BEFORE}, {}, "s\nq1\na1\nq", "r", ""),  # ms-swift
    ({"prefix": "p", "input_text": "x", "target_text": "y"}, {}, "p: x", "y", ""),  # simpletransformers
    ({"translation": {"en": "river", "zh": "河"}}, {}, "river", "河", ""),
    ({"a": {"b": "x"}, "c": "y"}, {"prompt_column": "a.b", "response_column": "c"}, "x", "y", ""),
    ({"prompt": "q", "response": "r", "past": [["q1", "a1"]]}, {"history_column": "past"}, "q1\na1\nq", "r", ""),
    ({"prompt": [user("q1"), bot("a1"), user("q")], "completion": [bot("r")]}, {}, "q1\na1\nq", "r", ""),  # TRL
    ({"conversations": TALK, "system": "s", "tools": ""}, {}, "s\nq", "r", "tools"),
    ({"messages": [user([part("a"), part("b")]), bot([part("r")])]}, {}, "ab", "r", ""),
    ({"prompt": "p", "response": 7, "meta": {"k": 1}, "history": []}, {}, "p", "7", "meta, history"),
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "flags", "prompt", "response", "unused"), PAIRS)
def test_a_layout_gives_what_its_documents_say(
    tmp_path: Path, row: Row, flags: dict[str, str], prompt: str, response: str, unused: str, ending: str
) -> None:
    path = write_rows(tmp_path / f"a.{ending}", [row])
    config, data, usable = examples_of(path, **flags)
    assert usable.texts == [(prompt, response)]
    assert dict(passed_over(config.data, data.task)).get("not used", "") == unused
    (question,) = read_prompts(data.sources, config.data, BadRows())
    assert Template().prompt(question.turns) == prompt, "generate asks what was learnt"


SQUAD = {"id": "7", "title": "t", "context": "c", "question": "q?"}
SEVERAL: list[tuple[Row, dict[str, str], list[str]]] = [  # right answers, each once
    ({"prompt": "p", "response": ["a", "b", "a"]}, {}, ["a", "b"]),
    ({"question": "p", "answer": ["a", " ", "b"], "context": None}, {}, ["a", "b"]),
    ({**SQUAD, "answers": {"text": ["a", "b"], "answer_start": [0, 1]}}, {}, ["a", "b"]),
    ({**SQUAD, "answers": [{"text": "a", "answer_start": 0}, {"text": "b", "answer_start": 1}]}, {}, ["a", "b"]),
    ({"prompt": "p", "names": ["a", "b"]}, {"response_column": "names"}, ["a", "b"]),
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "flags", "answers"), SEVERAL)
def test_of_several_right_answers_the_first_is_learnt_and_all_are_kept(
    tmp_path: Path, row: Row, flags: dict[str, str], answers: list[str], ending: str
) -> None:
    path = write_rows(tmp_path / f"a.{ending}", [row])
    config, data, usable = examples_of(path, is_finetune="True", **flags)
    assert [texts[1] for texts in usable.texts] == answers[:1]
    assert usable.references == [answers[1:]]
    assert "right answers" in dict(passed_over(config.data, data.task))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [user([{"type": "image_url", "image_url": "x"}]), bot("r")]}, "turn 1 holds a part of the type"),
        ({**SQUAD, "answers": {"text": [], "answer_start": []}}, "answers has no text under text"),
        ({"conversations": [{"role": "cook", "content": "x"}]}, "line 1: conversations turn 1 has the role cook"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_named(tmp_path: Path, row: Row, words: str) -> None:
    with pytest.raises(UserError, match=words):
        examples_of(write_rows(tmp_path / "a.jsonl", [row]))


ALPACA = [
    {"instruction": "翻译", "input": "river", "output": "河"},
    {"instruction": "写一首诗", "input": "", "output": "春眠不觉晓"},
]
ALPACA_TEXTS = [("翻译\nriver", "河"), ("写一首诗", "春眠不觉晓")]
SHORT = {"instruction": "说一句", "output": "好"}


@pytest.mark.parametrize("rows", [[*ALPACA, SHORT], [SHORT, *ALPACA]])
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_a_row_may_lack_a_column_that_another_has(tmp_path: Path, ending: str, rows: list[Row]) -> None:
    _, data, usable = examples_of(write_rows(tmp_path / f"a.{ending}", rows))
    assert data.columns.sides() == ["instruction+input", "output"]
    expected = ALPACA_TEXTS + [("说一句", "好")] * (len(rows) - 2)
    assert sorted(usable.texts) == sorted(expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a", "response": "b"}{"prompt": "c"}\n', "line 1: holds several objects"),
        ('{"version": "1", "data": [{"prompt": "a"}]}', "rows are under data; write that array alone"),
        ('{"prompt": {"0": "a"}, "response": {"0": "b"}}', "holds whole columns, not rows"),
    ],
)
def test_other_forms_of_json_are_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=words):
        examples_of(tmp_path / "a.json")
