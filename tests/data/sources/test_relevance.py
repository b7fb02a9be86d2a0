"""Rows of queries and judged documents: what a T5 and a head over labels learn of them, without a flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.batches.loader import StepLoader
from data.prepare.preparing import prepare
from data.prepare.unread import passed_over
from data.sources.lines import BadRows
from data.sources.prompts import read_prompts
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import byte_tokenizer
from settings.errors import UserError
from settings.loading import load
from tests.data.sources.rows import Row, examples_of, write_rows

A = "Query: q Document: a"
B = "Query: q Document: b"
# a row, and of each of its documents the text and what is learnt by a T5
ROWS: list[tuple[Row, list[tuple[str, str]]]] = [
    ({"query": "q", "pos": ["a"], "neg": ["b"]}, [(A, "true"), (B, "false")]),
    ({"query": "q", "positive": "a", "negative": "b"}, [(A, "true"), (B, "false")]),
    ({"query": "q", "document": "a", "neg": ["b", "b"]}, [(A, "true"), (B, "false"), (B, "false")]),
    ({"query": "q", "pos": [{"text": "a"}], "neg": None}, [(A, "true")]),
    ({"query": "q", "document": "a", "label": 1}, [(A, "true")]),
    ({"query": "q", "document": "b", "label": 0}, [(B, "false")]),
    ({"query": "q", "document": "a", "label": True}, [(A, "true")]),
    ({"query": "q", "document": "b", "label": "false"}, [(B, "false")]),
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "learnt"), ROWS)
def test_a_t5_learns_a_pair_of_each_document(
    tmp_path: Path, row: Row, learnt: list[tuple[str, str]], ending: str
) -> None:
    path = write_rows(tmp_path / f"a.{ending}", [{**row, "id": 7}])
    for flags in ({}, {"is_finetune": "True"}):
        config, data, usable = examples_of(path, **flags)
        assert usable.texts == [(f"{text} Relevant:", answer) for text, answer in learnt]
        assert dict(passed_over(config.data, data.task)) == {"not used": "id"}


def test_flat_rows_of_csv_are_read_and_asked_as_they_were_learnt(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", [{"query": "q", "document": "a", "label": 1}])
    config, data, usable = examples_of(path, is_finetune="True")
    assert usable.texts == [(f"{A} Relevant:", "true")]
    (question,) = read_prompts(data.sources, config.data, BadRows())
    assert question.text == f"{A} Relevant:"


@pytest.mark.parametrize(("row", "learnt"), ROWS[:2] + ROWS[4:6])
def test_a_head_learns_the_label_of_each_document(tmp_path: Path, row: Row, learnt: list[tuple[str, str]]) -> None:
    path = write_rows(tmp_path / "a.jsonl", [row])
    _, data, usable = examples_of(path, head="sequence", labels="regression")
    labels = {"true": "1", "false": "0"}
    assert data.objective == "sequence"
    assert usable.texts == [(text, json.dumps([labels[answer]])) for text, answer in learnt]


def test_a_head_learns_degrees_and_names(tmp_path: Path) -> None:
    rows = [{"query": "q", "document": "a", "label": label} for label in (2.5, "partly")]
    _, _, usable = examples_of(write_rows(tmp_path / "a.jsonl", rows), head="sequence")
    assert [label for _, label in usable.texts] == ['["2.5"]', '["partly"]']


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"query": "q", "document": "a", "label": 2}, "label is 2"),
        ({"query": "q", "document": "a", "label": "maybe"}, "label is maybe"),
        ({"query": " ", "document": "a", "label": 1}, "query is empty"),
        ({"query": "q", "pos": [], "neg": None}, "pos, neg is empty"),
        ({"query": "q", "pos": ["a", ""], "neg": []}, "pos holds an empty document"),
        ({"query": "q", "pos": [7], "neg": []}, "pos is int, not a text"),
        ({"query": "q", "pos": [{"title": "a"}], "neg": []}, "pos has no text under text"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_named(tmp_path: Path, row: Row, words: str) -> None:
    with pytest.raises(UserError, match=words):
        examples_of(write_rows(tmp_path / "a.jsonl", [row]), is_finetune="True")


def test_several_documents_are_no_prompt(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [ROWS[0][0]])
    config, data, _ = examples_of(path, is_finetune="True")
    with pytest.raises(UserError, match="pos, neg"):
        list(read_prompts(data.sources, config.data, BadRows()))


@pytest.mark.parametrize("flags", [{"is_finetune": True}, {"head": "sequence", "labels": "regression"}])
def test_of_a_long_document_the_end_is_left_out(tmp_path: Path, flags: dict[str, Any]) -> None:
    """What a T5 is asked stands behind the document, and stays."""
    byte_tokenizer().save(tmp_path / "bytes")
    rows = [{"query": "q", "pos": ["short", "d" * 100], "neg": ["short", "d" * 100]} for _ in range(4)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    folders = {"cache_dir": tmp_path / "cache", "tokenizer_dir": tmp_path / "bytes"}
    given = {"train_file": path, "validation_file": path, "max_seq_len": 48, **folders, **flags}
    config = load("train", {name: str(value) for name, value in given.items()})
    prepared = prepare(config)
    loader = StepLoader(prepared.train_dir, prepared.objective, config.data, config.model, seed=1)
    batches = list(loader.evaluation_batches(16, 1))
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    texts = {tokenizer.decode_answer(batch.input_ids[0, : batch.input_lengths[0]]) for batch in batches}
    ending = " Relevant:" if "is_finetune" in flags else ""
    cut = "Query: q Document: " + "d" * (47 - 19 - len(ending))
    assert texts == {f"Query: q Document: short{ending}", cut + ending}
    assert max(batch.input_lengths.max() for batch in batches) == 48
