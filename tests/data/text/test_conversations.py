from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import LowMemDataset
from data.prepare.encode import Encoder
from data.prepare.preparing import prepare
from data.prepare.writing import is_held_out
from data.text.conversations import Examples, turns_of
from data.text.templates import Template
from data.tokenizers.tokenizer import Tokenizer
from settings.errors import UserError

TURNS = [["user", "a?"], ["assistant", "A."], ["user", "b?"], ["assistant", "B."]]
SHAPES = [
    [{"role": role, "content": text} for role, text in TURNS],
    [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text} for role, text in TURNS],
    [["a?", "A."], ["b?", "B."]],
]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_usual_shapes_say_the_same(shape: list[Any]) -> None:
    assert turns_of(shape) == turns_of(json.dumps(shape)) == [tuple(turn) for turn in TURNS]


@pytest.mark.parametrize(
    "cell, words",
    [
        ("{", "no list of turns"),
        (7, "holds int"),
        ({"role": "user"}, "holds null"),
        (["a", "b"], "turn 1 is neither"),
        ([{"role": "cook", "content": "x"}], "role cook"),
        ([{"text": "x"}], "turn 1 has neither"),
        ([["q", "a"], ["q", None]], "turn 2 holds null"),
        ([{"role": "user", "content": [1]}], "holds list"),
        ([["\ud800", "a"]], "surrogate pair"),
    ],
)
def test_other_shapes_are_named(cell: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        turns_of(cell)


def made(form: str, row: tuple[str, ...], each: bool = False, clean: bool = False) -> list[tuple[str, ...]]:
    examples = Examples(clean, Template.load("chat"), form, each)
    return examples.usable([row]).texts


def test_the_last_answer_is_learnt_or_every_one() -> None:
    last = ("User: a?\nAssistant: A.\nUser: b?\nAssistant:", "B.")
    assert made("messages", (json.dumps(TURNS),)) == [last]
    assert made("messages", (json.dumps(TURNS),), each=True) == [("User: a?\nAssistant:", "A."), last]
    assert made("history", ("b?", "B.", json.dumps(TURNS[:2]))) == [last]
    assert made("messages", (json.dumps([["system", "s"], *TURNS[2:], ["user", "c?"]]),)) == [
        ("s\nUser: b?\nAssistant:", "B.")
    ]


def test_every_turn_is_cleaned_and_the_template_is_not() -> None:
    clean = [[role, f"{text} letters"] for role, text in TURNS]
    turns = [[role, f"  {text}\t\u200b "] for role, text in clean]
    assert made("messages", (json.dumps(turns),), clean=True) == made("messages", (json.dumps(clean),))


def test_conversations_without_an_answer_are_blank_rows() -> None:
    rows = [(json.dumps(turns),) for turns in ([], TURNS[:1], TURNS[1:2], [["user", " "], ["assistant", "x"]])]
    left = Examples(template=Template(), form="messages").usable(rows)
    assert (left.texts, left.blank, left.dropped.count) == ([], 4, 0)


def test_places_name_the_row_of_each_example() -> None:
    rows = [(json.dumps(TURNS[:1]),), (json.dumps(TURNS),)]
    assert Examples(template=Template(), form="messages", each_turn=True).usable(rows).places == [1, 1]


def write(folder: Path, kind: str, shape: int) -> Path:
    rows = [json.loads(json.dumps(SHAPES[shape]).replace("b?", f"b{number}?")) for number in range(20)]
    path = folder / f"talks.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([["conversations"], *([json.dumps(row)] for row in rows)])
    elif kind == "parquet":
        pq.write_table(pa.table({"conversations": rows}), path)
    else:
        table = pa.table({"conversations": rows})
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize(("kind", "shape"), [("jsonl", 0), ("csv", 1), ("parquet", 2), ("arrow", 0)])
def test_files_of_conversations_are_found_by_their_column(
    configure: Any, tmp_path: Path, kind: str, shape: int
) -> None:
    prepared = prepare(configure(train_file=write(tmp_path, kind, shape), prompt_template="chat"))
    assert prepared.objective == "pairs"
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    rows = [row for split in (prepared.train_dir, prepared.validation_dir) for row in LowMemDataset(split)]
    # 64 tokens are not cut here
    assert {tokenizer.decode(row["input_ids"]) for row in rows} == {
        f"User: a?\nAssistant: A.\nUser: b{number}?\nAssistant:" for number in range(20)
    }
    assert {tokenizer.decode(row["labels"]) for row in rows} == {"B."}


def test_expanding_turns_makes_other_shards(configure: Any, tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", 0)
    counts = [prepare(configure(train_file=path, expand_turns=each, dedup="exact")).counts for each in (False, True)]
    texts = [count["train_texts"] + count["validation_texts"] for count in counts]
    assert texts == [20, 21]  # all conversations begin alike, and a repeated example is dropped once


@pytest.mark.parametrize("flags", [{}, {"clean": True}, {"dedup": "exact"}])
def test_a_conversation_is_held_out_whole(configure: Any, tmp_path: Path, flags: dict[str, Any]) -> None:
    """The prompts of its later answers hold the earlier ones; rows are numbered, not answers."""
    path, talks = tmp_path / "talks.jsonl", 400
    with path.open("w") as file:
        for talk in range(talks):
            turns = [[f"q{talk}.{turn}", f"a{talk}.{turn}"] for turn in range(talk % 4)]
            file.write((json.dumps({"conversations": turns}) + "\n") * (2 if "dedup" in flags else 1))
    prepared = prepare(configure(train_file=path, expand_turns=True, max_seq_len=128, **flags))
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    train, held_out = (
        [tokenizer.decode(row["labels"]) for row in LowMemDataset(split)]
        for split in (prepared.train_dir, prepared.validation_dir)
    )
    lefts = [[f"a{talk}.{turn}" for turn in range(talk % 4)] for talk in range(talks) if talk % 4]
    assert held_out == [answer for number, left in enumerate(lefts) if is_held_out(number) for answer in left]
    assert train == [answer for number, left in enumerate(lefts) if not is_held_out(number) for answer in left]
    assert len(held_out) > 3


def test_history_beside_a_pair(configure: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"b{number}?", "response": "B.", "history": [["a?", "A."]] if number % 2 else None}
        for number in range(9)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare(configure(train_file=path, history_column="history", prompt_template="chat"))
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    texts = {tokenizer.decode(row["input_ids"]) for row in LowMemDataset(prepared.train_dir)}
    assert "User: a?\nAssistant: A.\nUser: b3?\nAssistant:" in texts and "User: b4?\nAssistant:" in texts


def test_broken_turns_are_named_by_file_and_row(configure: Any, tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", 0)
    path.write_text(path.read_text() + '{"conversations": [{"role": "cook", "content": "x"}]}\n')
    with pytest.raises(UserError, match=r"line 21: conversations turn 1 has the role cook"):
        prepare(configure(train_file=path))
    assert prepare(configure(train_file=path, skip_bad_rows=True)).counts["train_bad_rows"] == 1


def test_a_tokenizer_is_trained_on_what_was_said_alone(configure: Any, tmp_path: Path) -> None:
    from data.prepare.data_tokenizer import train_data_tokenizer
    from data.prepare.training_data import find_training_data

    config = configure(train_file=write(tmp_path, "jsonl", 0), tokenizer_dir="auto", vocab_size=400)
    trained = train_data_tokenizer(config.data, "bpe", 400, find_training_data(config.data, False))
    assert trained.encode_batch(["assistant"])[0].size > 1


@pytest.mark.parametrize("longest, kept", [(60, 2), (20, 1)])
def test_long_conversations_lose_their_oldest_turns(byte_dir: Path, longest: int, kept: int) -> None:
    turns = [["system", "Be kind."]]
    for number in range(4):
        turns += [["user", f"question {number}?"], ["assistant", f"answer {number}"]]
    examples = Examples(template=Template.load("{system}|{prompt}="), form="messages")
    encoder = Encoder(Tokenizer.load(byte_dir), examples, (longest, 50))
    encoded = encoder([(json.dumps(turns),)])
    ids, lengths = encoded.columns[0]
    text = encoder.tokenizer.decode(ids)
    asked = "".join(
        f"{'Be kind.' if number == 4 - kept else ''}|question {number}?= answer {number}\n"
        for number in range(4 - kept, 3)
    )
    last = f"{'Be kind.' if kept == 1 else ''}|question 3?="
    assert text == (asked + last)[: longest - 1]
    assert len(ids) == lengths[0] <= longest
    assert (
        int(encoded.uncut[0][0])
        == len(f"Be kind.|{'|'.join(f'question {n}?= answer {n}' + chr(10) for n in range(3))}|question 3?=") + 1
    )


@pytest.mark.parametrize(
    "source, flags, problems",
    [
        (
            "text_file",
            {"prompt_template": "chat", "source_prefix": "t: "},
            ["--prompt_template = chat", "--source_prefix = t:"],
        ),
        ("text_file", {"history_column": "h"}, ["--history_column = h"]),
        ("pairs_file", {"expand_turns": "True"}, ["--expand_turns = True"]),
        ("pairs_file", {"messages_column": "m", "history_column": "h"}, ["--history_column = h"]),
    ],
)
def test_settings_without_effect_are_refused(
    configure: Any, request: pytest.FixtureRequest, source: str, flags: dict[str, str], problems: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        prepare(configure(train_file=request.getfixturevalue(source), **flags))
    assert len(caught.value.problems) == len(problems)
    assert all(problem in str(caught.value) for problem in problems)


def test_validation_shards_need_the_same_template(configure: Any, pairs_file: Path) -> None:
    shards = prepare(configure(train_file=pairs_file, prompt_template="chat")).train_dir.parent
    same = configure(train_file=pairs_file, validation_file=shards, prompt_template="chat")
    assert prepare(same).validation_dir.parent == shards
    with pytest.raises(UserError, match="was written with --prompt_template='chat'"):
        prepare(configure(train_file=pairs_file, validation_file=shards))


def test_a_long_conversation_is_encoded_a_few_times(byte_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each turn that is left out, which would take hours."""
    turns = [[role, f"{role} {number}"] for number in range(500) for role in ("user", "assistant")]
    encoder = Encoder(
        Tokenizer.load(byte_dir), Examples(template=Template.load("{prompt}="), form="messages"), (60, 50)
    )
    sizes: list[int] = []
    plain = Tokenizer.encode_batch

    def counted(tokenizer: Tokenizer, texts: list[str], special: bool = False) -> object:
        sizes.append(sum(map(len, texts)))
        return plain(tokenizer, texts, special)

    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    encoded = encoder([(json.dumps(turns),)])
    assert (
        encoder.tokenizer.decode(encoded.columns[0][0])
        == "".join(f"user {number}= assistant {number}\n" for number in (497, 498)) + "user 499="
    )
    assert len(sizes) < 14 and sum(sizes) < 3 * sizes[0]
