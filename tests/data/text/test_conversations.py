"""Conversations: the shapes that are read, the pairs that are made of them, and what becomes of long ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.dataset import LowMemDataset
from data.prepare.encode import Encoder
from data.prepare.preparing import prepare
from data.prepare.writing import is_held_out
from data.text.conversations import Examples, turns_of
from data.text.templates import Template
from data.tokenizers.tokenizer import Tokenizer
from tests.data.sources.rows import write_rows

TURNS = [["user", "a?"], ["assistant", "A."], ["user", "b?"], ["assistant", "B."]]
SHAPES = [
    [{"role": role, "content": text} for role, text in TURNS],
    [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in TURNS],
    [["a?", "A."], ["b?", "B."]],
]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_usual_shapes_say_the_same(shape: list[Any]) -> None:
    assert turns_of(shape) == turns_of(json.dumps(shape)) == [tuple(turn) for turn in TURNS]


def texts(form: str, row: tuple[str, ...], each: bool = False, clean: bool = False) -> list[tuple[str, ...]]:
    return Examples(clean, Template.load("chat"), form, each).usable([row]).texts


def test_the_last_answer_is_learnt_or_every_one() -> None:
    last = ("User: a?\nAssistant: A.\nUser: b?\nAssistant:", "B.")
    assert texts("messages", (json.dumps(TURNS),)) == [last]
    assert texts("messages", (json.dumps(TURNS),), each=True) == [("User: a?\nAssistant:", "A."), last]
    assert texts("history", ("b?", "B.", json.dumps(TURNS[:2]))) == [last]
    ruled = [["system", "s"], *TURNS[2:], ["user", "c?"]]
    assert texts("messages", (json.dumps(ruled),)) == [("s\nUser: b?\nAssistant:", "B.")]


@pytest.mark.parametrize("flags", [{}, {"dedup": "exact"}])
def test_a_conversation_is_held_out_whole(configure: Any, tmp_path: Path, flags: dict[str, Any]) -> None:
    """The prompts of its later answers hold the earlier ones; rows are numbered, not answers."""
    answers = [[f"a{talk}.{turn}" for turn in range(talk % 4)] for talk in range(120)]
    rows: list[Any] = [
        {"conversations": [[answer.replace("a", "q"), answer] for answer in talk]}
        for talk in answers
        for _ in range(1 + ("dedup" in flags))
    ]
    path = write_rows(tmp_path / "talks.jsonl", rows)
    prepared = prepare(configure(train_file=path, expand_turns=True, max_seq_len=128, **flags))
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    train, held_out = (
        [tokenizer.decode(row["labels"]) for row in LowMemDataset(split)]
        for split in (prepared.train_dir, prepared.validation_dir)
    )
    talks = [talk for talk in answers if talk]
    assert held_out == [answer for number, talk in enumerate(talks) if is_held_out(number) for answer in talk] != []
    assert train == [answer for number, talk in enumerate(talks) if not is_held_out(number) for answer in talk]


@pytest.mark.parametrize(("longest", "kept_turns"), [(60, 2), (20, 1)])
def test_long_conversations_lose_their_oldest_turns(byte_dir: Path, longest: int, kept_turns: int) -> None:
    turns = [["system", "Be kind."]]
    for number in range(4):
        turns += [["user", f"question {number}?"], ["assistant", f"answer {number}"]]
    examples = Examples(template=Template.load("{system}|{prompt}="), form="messages")
    encoder = Encoder(Tokenizer.load(byte_dir), examples, (longest, 50))
    encoded = encoder([(json.dumps(turns),)])
    ids, lengths = encoded.columns[0]
    pieces = [f"|question {number}?= answer {number}\n" for number in range(3)] + ["|question 3?="]
    assert encoder.tokenizer.decode(ids) == ("Be kind." + "".join(pieces[-kept_turns:]))[: longest - 1]
    assert len(ids) == lengths[0] <= longest
    assert encoded.uncut[0][0] == len("Be kind." + "".join(pieces)) + 1
