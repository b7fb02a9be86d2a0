"""Preferences: the command `dpo`, the files it reads, its shards and batches, and rows that teach nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.prepare.preparing import prepare
from data.prepare.unread import passed_over
from settings.errors import UserError
from settings.loading import load
from tests.data.sources.rows import Row, examples_of, write_rows


def test_what_contradicts_dpo_is_refused_at_once() -> None:
    flags = {"train_file": "x", "is_finetune": "True", "label_smoothing": "0.1", "preference_loss": "orpo"}
    with pytest.raises(UserError) as caught:
        load("dpo", flags)
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == ["--is_finetune", "--label_smoothing"]
    load("dpo", {"label_smoothing": "0"})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


HH = "\n\nHuman: q1\n\nAssistant: a1\n\nHuman: q\n\nAssistant: "
LONG = [user("q1"), bot("a1"), user("q")]
SPOKEN = {"chosen": [*LONG, bot("c")], "rejected": [*LONG, bot("r")]}
BOTH = {"chosen": "c", "rejected": "r"}
SAID = {name: {"from": "gpt", "value": name[0]} for name in BOTH}
# a row, the encoder's text, columns that are not used
LAYOUTS: list[tuple[Row, str, str]] = [
    ({"prompt": [user("q")], "chosen": [bot("c")], "rejected": [bot("r")]}, "q", ""),
    ({**SPOKEN, "score": 1.0}, "q1\na1\nq", "score"),
    ({"prompt": "q1", **SPOKEN}, "q1\na1\nq", ""),
    ({"conversations": [{"from": "human", "value": "q"}], **SAID, "system": "s"}, "s\nq", ""),
    ({"chosen": f"{HH}c", "rejected": f"{HH}r"}, "q1\na1\nq", ""),
    ({"system": "s", "question": "q", **BOTH}, "s\nq", ""),
    ({"instruction": "i", "input": "x", **BOTH}, "i\nx", ""),
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "prompt", "unused"), LAYOUTS)
def test_a_layout_gives_what_its_documents_say(tmp_path: Path, row: Row, prompt: str, unused: str, ending: str) -> None:
    config, data, usable = examples_of(write_rows(tmp_path / f"a.{ending}", [row]), "dpo")
    assert usable.texts == [(prompt, "c", "r")]
    assert dict(passed_over(config.data, data.task)).get("not used", "") == unused


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (BOTH, "chosen and rejected has no turns, such as Human: and Assistant:"),
        ({"prompt": [bot("q")], **BOTH}, "chosen and rejected stand under no question"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_named(tmp_path: Path, row: Row, words: str) -> None:
    with pytest.raises(UserError, match=words):
        examples_of(write_rows(tmp_path / "a.jsonl", [row]), "dpo")


def good_rows(count: int) -> list[Row]:
    return [
        {"prompt": f"p{n} " + "x" * (n % 50), "chosen": f"good {n}", "rejected": f"bad {n}" * 9} for n in range(count)
    ]


@pytest.fixture
def preferences(configure: Any) -> Any:
    """Settings of a preference run on a file."""

    def make(path: Path, **flags: Any) -> Any:
        return configure(train_file=path, max_seq_len=40, max_target_len=30, **flags).with_changes(
            objective="preferences"
        )

    return make


@pytest.mark.parametrize(("name", "chosen", "rejected"), [("equal", "same\n", "same"), ("empty", "something", "  ")])
def test_rows_that_teach_nothing_are_counted_and_named(
    preferences: Any, tmp_path: Path, name: str, chosen: str, rejected: str
) -> None:
    bad = {"prompt": "the question", "chosen": chosen, "rejected": rejected}
    path = write_rows(tmp_path / "a.jsonl", [*good_rows(40), bad, bad, *good_rows(5)])
    with pytest.raises(UserError) as caught:
        prepare(preferences(path))
    (problem,) = caught.value.problems
    for words in ("--train_file", "2 rows", str(path), name, "'the question'", "--skip_bad_rows=True"):
        assert words in problem
    counts = prepare(preferences(path, skip_bad_rows=True)).counts
    assert counts["train_rows"] + counts["validation_rows"] == 45
    assert counts["train_dropped_rows"] == 2


def test_training_on_preferences_says_how(configure: Any, preferences: Any, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", good_rows(20))
    shards = prepare(preferences(path)).train_dir.parent
    for source in (path, shards):
        with pytest.raises(UserError, match="train on both with the dpo command"):
            prepare(configure(train_file=source))
    assert prepare(preferences(shards)).objective == "preferences"
