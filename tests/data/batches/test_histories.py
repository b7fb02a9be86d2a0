"""Histories are stored once and read as pairs: what came before each place, and the item there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.batches.loader import StepLoader
from data.prepare.preparing import prepare, prepare_evaluation
from data.prepare.preview import table_of_files
from data.tokenizers.tokenizer import Tokenizer
from settings.errors import UserError

CODES = {str(item): [item % 3, item // 3, item] for item in range(12)}
HISTORIES = [[1, 2, 3, 4, 5], [7, 8], [11, 10, 9, 3], [4], [0, 1, 2, 0, 1, 2, 0]]


def text_of(items: list[Any], by_codes: bool = True) -> str:
    if not by_codes:
        return ", ".join(map(str, items))
    return " ".join(f"<{level}_{code}>" for item in items for level, code in zip("abc", CODES[str(item)], strict=True))


def pairs_of(split: Path, config: Any) -> list[tuple[str, str]]:
    loader, tokenizer = StepLoader(split, "pairs", config), Tokenizer.load(split.parent / "tokenizer")
    batches = list(loader.evaluation_batches(100, 3))
    assert all(batch.input_lengths.max() <= loader.longest[0] for batch in batches)
    return [
        (tokenizer.decode_answer(ids[:length]), tokenizer.decode_answer(labels[:target]))
        for batch in batches
        for ids, length, labels, target in zip(
            batch.input_ids, batch.input_lengths, batch.labels, batch.target_lengths, strict=True
        )
    ]


@pytest.fixture
def items_file(tmp_path: Path) -> Path:
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"item": int(item), "codes": codes}) + "\n" for item, codes in CODES.items()))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_every_place_of_a_history_is_learnt_but_the_last(
    tmp_path: Path, configure: Any, items_file: Path, suffix: str
) -> None:
    path = tmp_path / f"histories.{suffix}"
    if suffix == "csv":
        path.write_text("items\n" + "".join(" ".join(map(str, items)) + "\n" for items in HISTORIES))
    else:
        path.write_text("".join(json.dumps({"user": 1, "items": items}) + "\n" for items in HISTORIES))
    flags = {"train_file": path, "item_file": items_file, "history_items": 3, "tokenizer_dir": "auto"}
    config = configure(**flags)
    prepared = prepare(config)
    long = [items for items in HISTORIES if len(items) > 1]
    wanted = [
        (text_of(items[max(0, at - 3) : at]), text_of([items[at]])) for items in long for at in range(1, len(items) - 1)
    ]
    assert pairs_of(prepared.train_dir, config) == wanted
    assert pairs_of(prepared.validation_dir, config) == [(text_of(items[-4:-1]), text_of(items[-1:])) for items in long]
    assert (prepared.counts["train_rows"], prepared.counts["train_empty_rows"]) == (len(wanted), 1)
    assert Tokenizer.load(prepared.tokenizer_dir).size == 3 + 3 + 4 + 12  # codes of each level, and special tokens
    # earlier prompts of a held-out history are those that its earlier items had
    asked = configure(**{**flags, "history_prompts": 3})
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    (batch,) = StepLoader(prepared.validation_dir, "pairs", asked).evaluation_batches(100, 100)
    for items, past in zip(long, batch.past or (), strict=True):
        ends = range(len(items) - 2, max(len(items) - 4, 0), -1)
        assert list(map(tokenizer.decode_answer, past.prompts)) == [
            text_of(items[max(0, end - 3) : end]) for end in ends
        ]
        assert tokenizer.decode_answer(past.items) == text_of(items[:-1])
    # a shorter prompt holds fewer items, each whole
    short = configure(**{**flags, "max_seq_len": 8})
    assert pairs_of(prepare(short).train_dir, short)[2] == (text_of([2, 3]), text_of([4]))


def test_items_without_codes_are_texts(tmp_path: Path, configure: Any) -> None:
    path = tmp_path / "histories.jsonl"
    path.write_text("".join(json.dumps({"items": list(map(str, items))}) + "\n" for items in HISTORIES * 40))
    config = configure(train_file=path, holdout="rows")
    train, held_out = (pairs_of(split, config) for split in (prepare(config).train_dir, prepare(config).validation_dir))
    assert train[2] == ("1, 2, 3", "4") and held_out[0] == ("7", "8")
    alone = configure(train_file=None, validation_file=path)
    assert pairs_of(prepare_evaluation(alone).validation_dir, alone)[0] == ("1, 2, 3, 4", "5")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_prompt_of_items_has_the_tokens_of_its_text(tmp_path: Path, configure: Any, kind: str) -> None:
    """Where a window begins as where a history does; a tokenizer writes a word behind a blank by another token."""
    names, path = ["red shirt", "blue hat", "red hat", "green shoes"], tmp_path / "histories.jsonl"
    path.write_text(
        "".join(json.dumps({"items": [names[(at + by) % 4] for by in range(4)]}) + "\n" for at in range(4)) * 30
    )
    flags = {"train_file": path, "tokenizer_type": kind, "tokenizer_dir": "auto", "vocab_size": 640, "history_items": 2}
    prepared = prepare(configure(**flags))
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    for more in ({}, {"reverse_histories": 0.5}):
        loader = StepLoader(prepared.train_dir, "pairs", configure(**flags, **more))
        (batch,) = loader.micro_batches(0, effective_batch_size=32, batch_size=32)
        for ids, length in zip(batch.input_ids, batch.input_lengths, strict=True):
            (text,) = tokenizer.encode_prompts([tokenizer.decode_answer(ids[: length - 1])])
            assert ids[: length - 1].tolist() == text.tolist()


def test_reversed_histories(tmp_path: Path, configure: Any, items_file: Path) -> None:
    path = tmp_path / "histories.jsonl"
    path.write_text(json.dumps({"items": [1, 2, 3, 4, 5, 6]}) + "\n")

    def read(**more: Any) -> list[tuple[str, str]]:
        config = configure(train_file=path, item_file=items_file, history_items=3, tokenizer_dir="auto", **more)
        prepared = prepare(config)
        tokenizer, loader = Tokenizer.load(prepared.tokenizer_dir), StepLoader(prepared.train_dir, "pairs", config)
        (batch,) = loader.micro_batches(0, effective_batch_size=32, batch_size=32)
        assert (batch.input_lengths.max(), batch.target_lengths.max()) <= loader.longest
        sides = zip(batch.input_ids, batch.input_lengths, batch.labels, batch.target_lengths, strict=True)
        return [(tokenizer.decode_answer(a[:n]), tokenizer.decode_answer(b[:m])) for a, n, b, m in sides]

    def wanted(items: list[int]) -> set[tuple[str, str]]:
        return {(text_of(items[max(0, at - 3) : at]), text_of([items[at]])) for at in range(1, len(items))}

    ways = [wanted(items) for items in ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1])]
    assert set(read()) == ways[0] and set(read(reverse_histories=1.0)) == ways[1]
    drawn = set(read(reverse_histories=0.5))
    assert drawn <= ways[0] | ways[1] and all(drawn & way for way in ways)


@pytest.mark.parametrize("written", ["unknown", "twice", "no codes"])
def test_what_is_wrong_with_items_is_told(tmp_path: Path, configure: Any, items_file: Path, written: str) -> None:
    path = tmp_path / "histories.jsonl"
    path.write_text(json.dumps({"items": [1, 2, 99 if written == "unknown" else 3]}) + "\n")
    if written == "twice":
        items_file.write_text('{"item": 1, "codes": [1]}\n{"item": "1", "codes": [2]}\n')
    elif written == "no codes":
        items_file.write_text('{"item": 1, "tokens": [1]}\n')
    with pytest.raises(UserError, match="item_file"):
        prepare(configure(train_file=path, item_file=items_file, tokenizer_dir="auto"))


def test_one_item_a_row_and_plain_text_are_refused(tmp_path: Path, configure: Any) -> None:
    (tmp_path / "ratings.inter").write_text("user_id:token\titem_id:token\n" + "1\t7\n" * 40)
    with pytest.raises(UserError, match="two items"):
        prepare(configure(train_file=tmp_path / "ratings.inter", items_column="item_id:token"))
    (tmp_path / "sequences.txt").write_text("1 7 8 9\n" * 40)
    with pytest.raises(UserError, match="items_column"):
        table_of_files(configure(train_file=tmp_path / "sequences.txt", items_column="items"), 1)


def test_changed_lengths_of_items_are_refused(tmp_path: Path, configure: Any, items_file: Path) -> None:
    from data.batches.loader import TokenRows

    rows: Any = [{"input_ids": np.arange(4), "labels": np.arange(4), "item_lengths": np.array([0, 2, 2, 0, 3, 2])}]
    with pytest.raises(UserError, match="prepare"):
        TokenRows(rows, 9, tmp_path)[0]
