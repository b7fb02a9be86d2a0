from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.dataset import LowMemDataset
from data.prepare.preparing import prepare
from data.text.templates import TEMPLATES, Template, template_of
from data.tokenizers.tokenizer import Tokenizer
from settings.errors import UserError

TALK = [("user", "Hi"), ("assistant", "Hello!"), ("user", "Who?")]


@pytest.mark.parametrize(
    "asked, system, expected",
    [
        ("plain", "Be kind.", "Be kind.\nHi\nHello!\nWho?"),
        ("chat", "Be kind.", "Be kind.\nUser: Hi\nAssistant: Hello!\nUser: Who?\nAssistant:"),
        ("chat_zh", None, "问：Hi\n答：Hello!\n问：Who?\n答："),
        ("Q: {prompt} {system}!", "s", "Q: Hi s! Hello!\nQ: Who? !"),
        (r"<{prompt}>\n", None, "<Hi>\nHello!\n<Who?>\n"),
    ],
)
def test_turns_are_written_one_after_the_other(asked: str, system: str | None, expected: str) -> None:
    assert Template.load(asked).prompt(TALK, system) == expected


def test_one_turn_fills_the_text_once_behind_the_prefix() -> None:
    assert Template.load("plain", "summarize: ").prompt([("user", "a {prompt} b")]) == "summarize: a {prompt} b"
    assert Template.load("question").prompt([("user", "why?")]) == "question: why?"


@pytest.mark.parametrize("prefix", ["summarize: "])
@pytest.mark.parametrize("asked", [*TEMPLATES, "Q: {prompt}\\nA:"])
def test_the_newest_question_is_found_again(asked: str, prefix: str) -> None:
    template = Template.load(asked, prefix)
    assert template.question(template.prompt([("user", "What is it?")]).strip()) == "What is it?"
    if asked in ("chat", "alpaca", "chat_zh"):
        talk = [("system", "Be kind."), *TALK]
        assert template.question(template.prompt(talk).strip()) == "Who?"
        cut = template.prompt(talk)[:-12]
        assert template.question(cut) == cut, "the end is missing, so nothing is taken off"


@pytest.mark.parametrize(
    "asked, words",
    [
        ("chatt", ["chatt", "plain, chat", "{prompt}"]),
        ("{prompt} {role}", ["unknown place {role}"]),
        ("{system}", ["exactly once"]),
    ],
)
def test_wrong_templates_are_user_errors(asked: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Template.load(asked)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("content", ["{", "[1]", '{"x": 1}'])
def test_a_broken_file_is_a_user_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "prompt_template.json").write_text(content)
    with pytest.raises(UserError, match="cannot be read"):
        Template.read(tmp_path)


def texts_of(prepared: Any, side: str) -> list[str]:
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    return [
        tokenizer.decode(row[side])
        for split in (prepared.train_dir, prepared.validation_dir)
        for row in LowMemDataset(split)
    ]


def test_prompts_are_worded_in_the_shards_and_responses_are_not(configure: Any, pairs_file: Path) -> None:
    config = configure(train_file=pairs_file, prompt_template="User: {prompt}\\nBot:", source_prefix="t: ")
    prepared = prepare(config)
    rows = [json.loads(line) for line in pairs_file.read_text().splitlines()]
    assert set(texts_of(prepared, "input_ids")) == {f"t: User: {row['prompt']}\nBot:" for row in rows}
    assert set(texts_of(prepared, "labels")) == {row["response"] for row in rows}
    plain = prepare(configure(train_file=pairs_file))
    assert plain.train_dir != prepared.train_dir
    assert Tokenizer.load(plain.tokenizer_dir).template == Template()


def test_the_template_goes_with_the_tokenizer(configure: Any, pairs_file: Path, tmp_path: Path) -> None:
    """From the shards into the model's folder, and from there into the next run."""
    prepared = prepare(configure(train_file=pairs_file, prompt_template="chat", source_prefix="t: "))
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    assert tokenizer.template == Template.load("chat", "t: ")
    tokenizer.save(tmp_path / "model")
    later = configure(train_file=pairs_file, tokenizer_dir=tmp_path / "model")
    assert template_of(later.data, tmp_path / "model") == tokenizer.template
    assert prepare(later).train_dir == prepared.train_dir
    without = configure(
        train_file=pairs_file, tokenizer_dir=tmp_path / "model", prompt_template="plain", source_prefix="none"
    )
    assert template_of(without.data, tmp_path / "model") == Template()


def test_shards_keep_the_template_they_were_written_with(configure: Any, pairs_file: Path) -> None:
    shards = prepare(configure(train_file=pairs_file, prompt_template="chat")).train_dir.parent
    assert prepare(configure(train_file=shards)).train_dir.parent == shards
    assert prepare(configure(train_file=shards, prompt_template="chat")).train_dir.parent == shards
    with pytest.raises(UserError, match="was written with --prompt_template='chat'"):
        prepare(configure(train_file=shards, prompt_template="plain"))
