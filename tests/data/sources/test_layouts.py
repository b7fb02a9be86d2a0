"""Files as their documents have them, without a flag: what is learnt of a row, and which columns are not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare.unread import passed_over
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.prompts import read_prompts
from data.text.templates import Template
from settings.declared import DataConfig
from settings.errors import UserError
from tests.data.sources.rows import Row, examples_of, rows_of, write_rows


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
    (
        {"source": "x", "target": "y", "note": "z"},
        {"prompt_column": "note", "response_column": "target"},
        "z",
        "y",
        "source",
    ),
    ({"prompt": "q", "response": "r", "past": [["q1", "a1"]]}, {"history_column": "past"}, "q1\na1\nq", "r", ""),
    ({"prompt": [user("q1"), bot("a1"), user("q")], "completion": [bot("r")]}, {}, "q1\na1\nq", "r", ""),  # TRL
    ({"conversations": TALK, "system": "s", "tools": ""}, {}, "s\nq", "r", "tools"),
    ({"messages": [user([part("a"), part("b")]), bot([part("r")])]}, {}, "ab", "r", ""),
    ({"prompt": "p", "response": 7, "meta": {"k": 1}, "history": []}, {}, "p", "7", "meta, history"),
    ({"prompt": "p", "response": 3.8}, {}, "p", "3.8", ""),
    ({"prompt": "p", "response": True}, {}, "p", "true", ""),
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
    ({"prompt": "p", "response": [3, 4]}, {}, ["3", "4"]),
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
        ({"prompt": 7, "response": "r"}, "prompt is int, not a text"),
        ({"prompt": "p", "response": float("nan")}, "response is float, not a text"),
        ({**SQUAD, "answers": {"text": [], "answer_start": []}}, "answers has no text under text"),
        ({"conversations": [{"role": "cook", "content": "x"}]}, "line 1: conversations turn 1 has the role cook"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_named(tmp_path: Path, row: Row, words: str) -> None:
    with pytest.raises(UserError, match=words):
        examples_of(write_rows(tmp_path / "a.jsonl", [row]))


def test_numbers_are_written_alike_in_every_format(tmp_path: Path) -> None:
    """As plain decimals, whatever the width of the type."""
    values = pa.array([3.8, 1.0, 1e-7, None], pa.float32())
    table = pa.table({"prompt": ["a"] * 4, "response": values})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("prompt,response\na,3.8\na,1.0\na,0.0000001\n")
    assert examples_of(tmp_path / "a.csv")[2].texts == [("a", "3.8"), ("a", "1.0"), ("a", "0.0000001")]
    data = examples_of(tmp_path / "a.csv")[1]
    bad_rows = BadRows(skip=True)
    rows = rows_of(tmp_path / "a.parquet", data.columns, bad_rows)
    assert [text for _, text in rows] == ["3.8", "1.0", "0.0000001"]
    assert bad_rows.count == 1


ALPACA = [
    {"instruction": "翻译", "input": "river", "output": "河"},
    {"instruction": "写一首诗", "input": "", "output": "春眠不觉晓"},
    {"instruction": "再写一首", "input": None, "output": "处处闻啼鸟"},
]
ALPACA_TEXTS = [("翻译\nriver", "河"), ("写一首诗", "春眠不觉晓"), ("再写一首", "处处闻啼鸟")]
SHORT = {"instruction": "说一句", "output": "好"}


@pytest.mark.parametrize("rows", [ALPACA, [*ALPACA, SHORT], [SHORT, *ALPACA]])
@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_a_row_may_lack_a_column_that_another_has(tmp_path: Path, ending: str, rows: list[Row]) -> None:
    _, data, usable = examples_of(write_rows(tmp_path / f"a.{ending}", rows))
    assert data.columns.sides() == ["instruction+input", "output"]
    expected = ALPACA_TEXTS + [("说一句", "好")] * (len(rows) - 3)
    assert sorted(usable.texts) == sorted(expected)


def test_a_file_may_lack_what_another_of_its_folder_has(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"instruction": "i", "input": "x", "output": "o", "system": "s"}])
    write_rows(tmp_path / "b.jsonl", [{"instruction": "i", "output": "o"}])
    assert examples_of(tmp_path)[2].texts == [("s\ni\nx", "o"), ("i", "o")]


def test_a_row_without_a_key_is_bad(tmp_path: Path) -> None:
    rows = [{"translation": {"en": "river", "zh": "河"}}, {"translation": {"en": "sea"}}]
    with pytest.raises(UserError, match=r"line 2: translation has no text under zh"):
        examples_of(write_rows(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "csv"])
def test_a_text_made_of_two_columns_may_lack_the_second(tmp_path: Path, ending: str) -> None:
    path = write_rows(tmp_path / f"a.{ending}", [{"title": "x", "body": "y"}, {"title": "z", "body": None}])
    assert rows_of(path, ("title+body",)) == [("x\ny",), ("z",)]


def test_what_only_later_rows_have_makes_the_file_no_other(tmp_path: Path) -> None:
    pair = {"question": "a", "answer": "b"}
    path = write_rows(tmp_path / "a.jsonl", [pair, {**pair, "text": "c", "messages": []}, pair])
    assert examples_of(path)[2].texts == [("a", "b")] * 3


def test_a_named_prompt_may_be_missing_in_the_first_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "t"}, {"text": "u", "body": "b"}])
    bad_rows = BadRows(skip=True)
    prompts = read_prompts(find(str(path)), DataConfig(prompt_column="body"), bad_rows)
    assert [prompt.text for prompt in prompts] == ["", "b"]
    assert bad_rows.count == 1
    assert [prompt.text for prompt in read_prompts(find(str(path)), DataConfig(), BadRows())] == ["t", "u"]


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "a\n\n \nb\n\n", ["a", "", "", "b", ""]),
        (
            "a.jsonl",
            '{"prompt": "a"}\nbroken\n{"prompt": ""}\n{"x": 1}\n{"prompt": "b"}\n[]\n',
            ["a", "", "", "", "b", ""],
        ),
        ("a.csv", 'prompt,x\na,1\nb\n"",2\nc,3\n', ["a", "", "", "c"]),
    ],
)
def test_each_row_gives_one_prompt(tmp_path: Path, name: str, text: str, prompts: list[str]) -> None:
    """A blank one where it is bad, so that answers stand beside their rows."""
    (tmp_path / name).write_text(text)
    bad_rows = BadRows(skip=True)
    read = read_prompts(find(str(tmp_path / name)), DataConfig(), bad_rows)
    assert [prompt.text for prompt in read] == prompts
    assert bad_rows.count == prompts.count("")


def test_the_header_names_the_columns_of_prompts(tmp_path: Path) -> None:
    """What is not UTF-8 in it becomes a mark; the other columns are read all the same."""
    path = tmp_path / "a.csv"
    path.write_bytes("prompt,cat\u00e9gorie\na,b\n".encode("cp1252"))
    (prompt,) = read_prompts(find(str(path)), DataConfig(), BadRows())
    assert prompt.text == "a"
    assert list(prompt.columns.values()) == ["a", "b"]
    path.write_text("prompt,,\na,b,c\n")  # Spreadsheets write empty columns so.
    assert [prompt.text for prompt in read_prompts(find(str(path)), DataConfig(), BadRows())] == ["a"]
    path.write_text("prompt,x,x\na,b,c\n")
    with pytest.raises(UserError, match="several columns are called x; give each a name of its own"):
        list(read_prompts(find(str(path)), DataConfig(), BadRows()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a", "response": "b"}{"prompt": "c"}\n', "line 1: holds several objects"),
        ('{"version": "1", "data": [{"prompt": "a"}]}', "rows are under data; write that array alone"),
        ('{\n "version": "1",\n "data": [\n  {\n   "prompt": "a"}]}', "rows are under data"),
        ('{"prompt": {"0": "a"}, "response": {"0": "b"}}', "holds whole columns, not rows"),
        ('{"prompt": ["a"], "response": ["b"]}', "holds whole columns, not rows"),
        (json.dumps([{"prompt": "a", "response": "b"}] * 5)[:-20], "row 5: is not JSON .* truncated there"),
    ],
)
def test_other_forms_of_json_are_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=words):
        examples_of(tmp_path / "a.json")
