"""Files as their documents have them: what the encoder and the decoder get of a row, and which columns are named as not
used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare.training_data import TrainingData, find_training_data, held_out_sources
from data.prepare.unread import passed_over
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.prompts import read_prompts
from data.sources.reading import head_of, read_rows
from data.text.templates import Template
from settings.errors import UserError
from settings.loading import load
from settings.tasks import task_named


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


PART = {"type": "text", "text": "r"}
SQUAD = {"id": "7", "title": "t", "context": "c", "question": "q?"}
BEFORE = {"system": "s", "history": [["q1", "a1"]]}
# a row, flags, encoder's text, the decoder's texts, columns that are not used
PAIRS: list[tuple[dict[str, Any], dict[str, str], str, list[str], str]] = [
    ({"instruction": "i", "input": "x", "output": "o", **BEFORE}, {}, "s\nq1\na1\ni\nx", ["o"], ""),  # LLaMA-Factory
    ({"instruction": "i", "input": "", "output": "o", "system": "", "history": []}, {}, "i", ["o"], ""),
    (
        {"instruction": "i", "output": "o", "text": "t"},
        {"is_finetune": "True"},
        "i",
        ["o"],
        "text",
    ),  # Stanford's Alpaca
    ({"instruction": "i", "context": "c", "response": "r", "category": "k"}, {}, "i\nc", ["r"], "category"),  # Dolly
    ({"query": "q", "response": "r", **BEFORE}, {}, "s\nq1\na1\nq", ["r"], ""),  # ms-swift
    ({"prefix": "p", "input_text": "x", "target_text": "y"}, {}, "p: x", ["y"], ""),  # simpletransformers
    ({**SQUAD, "answers": {"text": ["a", "b"], "answer_start": [0, 1]}}, {}, "q?\nc", ["a"], "id, title"),
    (
        {"a": "x", "b": {"c": ["y"]}},
        {"prompt_column": "a", "response_column": "b.c", "objective": "pairs"},
        "x",
        ["y"],
        "",
    ),
    ({"prompt": [user("q1"), bot("a1"), user("q")], "completion": [bot("r")]}, {}, "q1\na1\nq", ["r"], ""),  # TRL
    (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}], "system": "s", "tools": ""},
        {},
        "s\nq",
        ["r"],
        "tools",
    ),
    (
        {"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), bot([PART])]},
        {},
        "ab",
        ["r"],
        "",
    ),
    ({"prompt": "p", "response": 7, "meta": {"k": 1}, "history": []}, {}, "p", ["7"], "meta, history"),
    ({"prompt": "p", "response": 3.8}, {}, "p", ["3.8"], ""),
    ({"prompt": "p", "response": True}, {}, "p", ["true"], ""),
]
HH = "\n\nHuman: q1\n\nAssistant: a1\n\nHuman: q\n\nAssistant: "
LONG = [user("q1"), bot("a1"), user("q")]
SEVERAL: list[tuple[dict[str, Any], dict[str, str], list[str]]] = [  # right answers, each once
    ({"prompt": "p", "response": ["a", "b", "a"]}, {}, ["a", "b"]),
    ({"prompt": "p", "response": [3, 4]}, {}, ["3", "4"]),
    ({"question": "p", "answer": ["a", " ", "b"], "context": None}, {}, ["a", "b"]),
    ({**SQUAD, "answers": {"text": ["a", "b"], "answer_start": [0, 1]}}, {}, ["a", "b"]),
    ({**SQUAD, "answers": [{"text": "a", "answer_start": 0}, {"text": "b", "answer_start": 1}]}, {}, ["a", "b"]),
    ({"prompt": "p", "names": ["a", "b"]}, {"response_column": "names"}, ["a", "b"]),
]
PREFERENCES: list[tuple[dict[str, Any], dict[str, str], str, list[str], str]] = [
    ({"prompt": [user("q")], "chosen": [bot("c")], "rejected": [bot("r")]}, {}, "q", ["c", "r"], ""),
    ({"chosen": [*LONG, bot("c")], "rejected": [*LONG, bot("r")], "score": 1.0}, {}, "q1\na1\nq", ["c", "r"], "score"),
    ({"prompt": "q1", "chosen": [*LONG, bot("c")], "rejected": [*LONG, bot("r")]}, {}, "q1\na1\nq", ["c", "r"], ""),
    (
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "c"},
            "rejected": {"from": "gpt", "value": "r"},
            "system": "s",
        },
        {},
        "s\nq",
        ["c", "r"],
        "",
    ),
    ({"chosen": f"{HH}c", "rejected": f"{HH}r"}, {}, "q1\na1\nq", ["c", "r"], ""),
    ({"system": "s", "question": "q", "chosen": "c", "rejected": "r"}, {}, "s\nq", ["c", "r"], ""),
    ({"instruction": "i", "input": "x", "chosen": "c", "rejected": "r"}, {}, "i\nx", ["c", "r"], ""),
    (
        {"prompt": [user("q")], "chosen": [bot("c")], "rejected": [bot("r")]},
        {"objective": "pairs", "response_column": "chosen"},
        "q",
        ["c"],
        "rejected",
    ),  # as a model that learnt them is measured
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [user([{"type": "image_url", "image_url": "x"}]), bot([PART])]},
        "turn 1 holds a part of the type image_url",
    ),
    ({"chosen": "c", "rejected": "r"}, "chosen and rejected has no turns, such as Human: and Assistant:"),
    (
        {"chosen": [user("q"), bot("a"), user("x"), bot("c")], "rejected": [user("q"), bot("b"), user("x"), bot("r")]},
        "chosen and rejected do not end with one answer each",
    ),
    (
        {"prompt": "other", "chosen": [user("q"), bot("c")], "rejected": [user("q"), bot("r")]},
        "another question than the prompt",
    ),
    ({"prompt": [bot("q")], "chosen": "c", "rejected": "r"}, "chosen and rejected stand under no question"),
    ({"prompt": 7, "response": "r"}, "prompt is int, not a text"),
    ({"prompt": "p", "response": float("nan")}, "response is float, not a text"),
    ({**SQUAD, "answers": {"text": [], "answer_start": []}}, "answers has no text under text"),
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data_of(path: Path, row: dict[str, Any], flags: dict[str, str]) -> tuple[Any, TrainingData]:
    is_dpo = "rejected" in row and "objective" not in flags
    command = "dpo" if is_dpo else "train"
    config = load(command, {"train_file": str(path), **flags})
    return config, find_training_data(config.data, config.train.is_finetune)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "flags", "asked", "answers", "unused"), PAIRS + PREFERENCES)
def test_a_shape_gives_what_its_documents_say(
    tmp_path: Path, row: dict[str, Any], flags: dict[str, str], asked: str, answers: list[str], unused: str, kind: str
) -> None:
    path = written(tmp_path / f"a.{kind}", [row])
    config, data = data_of(path, row, flags)
    rows = [row for batch in read_rows(data.sources, data.columns, BadRows()) for row in batch]
    examples = data.task.examples(config.data, config.cleaning.clean, data.columns, tmp_path)
    assert examples.usable(rows).texts == [(asked, *answers)]
    assert [cells for name, cells in passed_over(config.data, data.task) if name == "not used"] == (
        [unused] if unused else []
    )
    if len(answers) == 1 and "objective" not in flags:  # generate asks what was learnt
        (prompt,) = read_prompts(data.sources, config.data, BadRows())
        assert Template().prompt(prompt.turns) == asked


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "flags", "answers"), SEVERAL)
def test_of_several_right_answers_the_first_is_learnt_and_all_are_kept(
    tmp_path: Path, row: dict[str, Any], flags: dict[str, str], answers: list[str], kind: str
) -> None:
    config, data = data_of(written(tmp_path / f"a.{kind}", [row]), row, {"is_finetune": "True", **flags})
    (rows,) = read_rows(data.sources, data.columns, BadRows())
    usable = data.task.examples(config.data, config.cleaning.clean, data.columns, tmp_path).usable(rows)
    assert [texts[1] for texts in usable.texts] == answers[:1] and usable.references == [answers[1:]]
    assert [name for name, _ in passed_over(config.data, data.task) if name == "right answers"] == ["right answers"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "told"), REFUSED)
def test_a_row_that_cannot_be_learnt_is_named(tmp_path: Path, row: dict[str, Any], told: str, kind: str) -> None:
    if kind == "parquet" and (row.get("prompt") == 7 or "stand under" in told):
        return  # a column of one type
    _, data = data_of(written(tmp_path / f"a.{kind}", [row]), row, {})
    with pytest.raises(UserError, match=told):
        list(read_rows(data.sources, data.columns, BadRows()))


def test_numbers_are_told_alike_in_every_format(tmp_path: Path) -> None:
    """As plain decimals, whatever the width of the type."""
    values = pa.array([3.8, 1.0, 1e-7, None], pa.float32())
    pq.write_table(pa.table({"prompt": ["a"] * 4, "response": values}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("prompt,response\na,3.8\na,1.0\na,0.0000001\n")
    for name, bad in (("a.parquet", 1), ("a.csv", 0)):
        data, found = (
            find_training_data(load("train", {"train_file": str(tmp_path / name)}).data, False),
            BadRows(skip=True),
        )
        rows = [row for batch in read_rows(data.sources, data.columns, found) for row in batch]
        assert [text for _, text in rows] == ["3.8", "1.0", "0.0000001"] and found.count == bad


def test_a_file_may_lack_what_another_of_its_folder_has(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", [{"instruction": "i", "input": "x", "output": "o", "system": "s"}])
    written(tmp_path / "b.jsonl", [{"instruction": "i", "output": "o"}])
    data = find_training_data(load("train", {"train_file": str(tmp_path)}).data, False)
    found = [row[:2] for batch in read_rows(data.sources, data.columns, BadRows()) for row in batch]
    assert found == [("i\nx", "o"), ("i", "o")]


# files of a folder; those that train, those held out, what is told
SPLITS: list[tuple[list[str], list[str], list[str], list[tuple[str, str]]]] = [
    (
        [
            "data/train-00000-of-00001.parquet",
            "data/validation-00000-of-00001.parquet",
            "data/test-00000-of-00001.parquet",
        ],
        ["train-00000-of-00001.parquet"],
        ["validation-00000-of-00001.parquet"],
        [
            ("not read", "1 file named as test data, first {}/data/test-00000-of-00001.parquet"),
            ("held out", "1 file named as validation data, first {}/data/validation-00000-of-00001.parquet"),
        ],
    ),
    (
        ["Train.jsonl", "my_dev.jsonl", "more.jsonl"],
        ["Train.jsonl"],
        ["my_dev.jsonl"],
        [
            ("not read", "1 file whose names mention no split, first {}/more.jsonl"),
            ("held out", "1 file named as validation data, first {}/my_dev.jsonl"),
        ],
    ),
    (
        ["training/x.jsonl", "eval/train.jsonl"],
        ["x.jsonl"],
        [],
        [("not read", "1 file named as test data, first {}/eval/train.jsonl")],
    ),
    (["a.jsonl", "contest.jsonl", "trainer.jsonl"], ["a.jsonl", "contest.jsonl", "trainer.jsonl"], [], []),
    (
        ["a.jsonl", "test.jsonl"],
        ["a.jsonl", "test.jsonl"],
        [],
        [("read too", "1 file named as validation or test data, because none is named train, first {}/test.jsonl")],
    ),
]


@pytest.mark.parametrize(("files", "train", "held_out", "told"), SPLITS)
def test_the_names_of_files_say_their_split(
    tmp_path: Path, files: list[str], train: list[str], held_out: list[str], told: list[tuple[str, str]]
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path / name, [{"prompt": "p", "response": "r"}])
    config = load("train", {"train_file": str(tmp_path)})
    assert [source.path.name for source in find(str(tmp_path))] == train
    assert [source.path.name for source in held_out_sources(config.data)] == held_out
    assert passed_over(config.data, task_named("pairs")) == [(name, words.format(tmp_path)) for name, words in told]
    named = load("train", {"train_file": str(tmp_path), "validation_file": str(tmp_path / files[0])})
    assert [source.path.name for source in held_out_sources(named.data)] == [Path(files[0]).name]
    if held_out:
        assert [source.path.name for source in find(str(tmp_path), "--validation_file")] == held_out
    assert len(find(str(tmp_path), "--input")) == len(files)


CELLS = [('he said "no"', "plain"), ("x", '"yes", she said'), ("two\nlines", "a\ttab"), ("say", "nothing")]
# a file of TSV, whether its cells are quoted
TSV: list[tuple[str, bool]] = [
    (pandas.DataFrame(CELLS, columns=["prompt", "response"]).to_csv(sep="\t", index=False), True),
    ("prompt\tresponse\n" + "a\tb\n" * 1000 + 'a\t"b ""c"""\n', True),
    ('"prompt"\t"response"\n"a"\t"b"\n', True),
    ('prompt\tresponse\n5" pipe\tb\na\tsaid "b"\n', False),
    ('prompt\tresponse\n"a"\tb\n"Stop!" he said\tb\n', False),
    ('prompt\tresponse\n"Stop\tb\na\tb\n', False),
]


@pytest.mark.parametrize(("text", "is_read_as_quoted"), TSV)
def test_cells_of_tsv_are_quoted_where_all_that_begin_so_are(
    tmp_path: Path, text: str, is_read_as_quoted: bool
) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(text)
    (source,) = find(str(path))
    assert head_of(source).is_quoted == is_read_as_quoted and head_of(source).names == ["prompt", "response"]
    rows = [row for batch in read_rows([source], ["prompt", "response"], BadRows()) for row in batch]
    how = {} if is_read_as_quoted else {"quoting": 3}
    assert rows == list(pandas.read_csv(path, sep="\t", **how).itertuples(index=False, name=None))
    told = [
        cell
        for name, cell in passed_over(load("train", {"train_file": str(path)}).data, task_named("pairs"))
        if name == "quotes"
    ]
    assert bool(told) == is_read_as_quoted


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.jsonl", '{"prompt": "a", "response": "b"}{"prompt": "c"}\n', "line 1: holds several objects"),
        ("a.json", '{"version": "1", "data": [{"prompt": "a"}]}', "rows are under data; write that array alone"),
        ("a.json", '{\n "version": "1",\n "data": [\n  {\n   "prompt": "a"}]}', "rows are under data"),
        ("a.json", '{"prompt": {"0": "a"}, "response": {"0": "b"}}', "holds whole columns, not rows"),
        ("a.json", '{"prompt": ["a"], "response": ["b"]}', "holds whole columns, not rows"),
    ],
)
def test_other_forms_of_json_are_named(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=told):
        find_training_data(load("train", {"train_file": str(tmp_path / name)}).data, False)


@pytest.mark.parametrize("sign", [";", "\t", ","])
def test_the_first_line_of_csv_may_name_what_parts_cells(tmp_path: Path, sign: str) -> None:
    """As Excel reads it."""
    (tmp_path / "a.csv").write_bytes(f"sep={sign}\r\nprompt{sign}response\r\na{sign}b\r\n".encode("utf-8-sig"))
    assert list(read_rows(find(str(tmp_path / "a.csv")), ["prompt", "response"], BadRows())) == [[("a", "b")]]


@pytest.mark.parametrize(
    ("name", "text", "found"),
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
def test_a_row_of_prompts_gives_a_prompt(tmp_path: Path, name: str, text: str, found: list[str]) -> None:
    (tmp_path / name).write_text(text)
    bad = BadRows(skip=True)
    prompts = read_prompts(find(str(tmp_path / name)), load("generate", {"model": "x"}).data, bad)
    assert [prompt.text for prompt in prompts] == found and bad.count == found.count("")
