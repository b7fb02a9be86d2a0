"""Templates: how turns are written, found again, and kept beside shards and models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.dataset import LowMemDataset
from data.prepare.preparing import prepare
from data.text.templates import Template, template_of
from data.tokenizers.tokenizer import Tokenizer
from settings.errors import UserError

TALK = [("user", "Hi"), ("assistant", "Hello!"), ("user", "Who?")]


@pytest.mark.parametrize(
    ("name", "system", "expected"),
    [
        ("plain", "Be kind.", "Be kind.\nHi\nHello!\nWho?"),
        ("chat", "Be kind.", "Be kind.\nUser: Hi\nAssistant: Hello!\nUser: Who?\nAssistant:"),
        ("chat_zh", None, "问：Hi\n答：Hello!\n问：Who?\n答："),
        (r"<{prompt}>\n", None, "<Hi>\nHello!\n<Who?>\n"),
    ],
)
def test_turns_are_written_one_after_the_other(name: str, system: str | None, expected: str) -> None:
    assert Template.load(name).prompt(TALK, system) == expected


def test_one_turn_fills_the_text_once_behind_the_prefix() -> None:
    assert Template.load("plain", "summarize: ").prompt([("user", "a {prompt} b")]) == "summarize: a {prompt} b"
    assert Template.load("question").prompt([("user", "why?")]) == "question: why?"


def test_the_template_goes_with_shards_and_tokenizer(configure: Any, pairs_file: Path, tmp_path: Path) -> None:
    """From the shards into the model's folder, and from there into the next run."""
    prepared = prepare(configure(train_file=pairs_file, prompt_template="User: {prompt}\\nBot:", source_prefix="t: "))
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    rows = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    split_rows = list(LowMemDataset(prepared.train_dir)) + list(LowMemDataset(prepared.validation_dir))
    texts = {(tokenizer.decode(row["input_ids"]), tokenizer.decode(row["labels"])) for row in split_rows}
    assert texts == {(f"t: User: {row['prompt']}\nBot:", row["response"]) for row in rows}
    assert tokenizer.template == Template.load("User: {prompt}\\nBot:", "t: ")

    tokenizer.save(tmp_path / "model")
    later = configure(train_file=pairs_file, tokenizer_dir=tmp_path / "model")
    assert template_of(later.data, tmp_path / "model") == tokenizer.template
    assert prepare(later).train_dir == prepared.train_dir
    flags = {"tokenizer_dir": tmp_path / "model", "prompt_template": "plain", "source_prefix": "none"}
    plain = configure(train_file=pairs_file, **flags)
    assert template_of(plain.data, tmp_path / "model") == Template()
    assert prepare(plain).train_dir != prepared.train_dir

    shards = prepared.train_dir.parent
    same = configure(train_file=shards)
    assert prepare(same).train_dir == prepared.train_dir
    with pytest.raises(UserError, match="was written with --prompt_template='User"):
        prepare(configure(train_file=shards, prompt_template="plain"))
    with pytest.raises(UserError, match="was written with --prompt_template='User"):
        prepare(configure(train_file=pairs_file, validation_file=shards))
