"""Long prompts are cut into parts that say the same."""

from __future__ import annotations

import pytest

from data.text.templates import ASSISTANT, USER, Template
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import byte_tokenizer
from settings.declared import GenerateConfig
from training.evaluation.prompt_parts import PromptParts

WORDS = " ".join(f"word{number}" for number in range(60))
SENTENCES = "The king came. " * 3 + "He built the great wall of the town and all that is in it. " + "He went. " * 9
CHINESE = "国王来了。他修建了城墙和城里的一切。" * 8


def parts_of(tokenizer: Tokenizer, most: int, text: str) -> list[str]:
    parts = PromptParts(tokenizer, tokenizer.template, GenerateConfig(split_prompts=most))
    (ids,) = tokenizer.encode_prompts([tokenizer.template.prompt([(USER, text)])])
    split = parts.split([*ids.tolist(), tokenizer.eos_id])
    assert all(ids[-1] == tokenizer.eos_id and tokenizer.eos_id not in ids[:-1] for ids in split)
    assert len(split) == 1 or max(map(len, split)) <= 1.6 * most + len(tokenizer.template.prompt([(USER, "")]))
    return [tokenizer.decode(ids) for ids in split]


@pytest.mark.parametrize("text", [WORDS, SENTENCES, CHINESE, "a" * 200])
def test_the_parts_say_what_the_prompt_says(text: str) -> None:
    texts = parts_of(byte_tokenizer(), 50, text)
    assert len(texts) > 2 and "".join("".join(texts).split()) == "".join(text.split())
    if text in (WORDS, SENTENCES):
        assert " ".join(texts).split() == text.split()  # no word is cut
    assert parts_of(byte_tokenizer(), 1000, text) == [text]


def test_a_conversation_stays_whole() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.template = Template.load("chat")
    turns = [(USER, WORDS), (ASSISTANT, "yes"), (USER, WORDS)]
    (ids,) = tokenizer.encode_prompts([tokenizer.template.prompt(turns)])
    prompt = [*ids.tolist(), tokenizer.eos_id]
    assert PromptParts(tokenizer, tokenizer.template, GenerateConfig(split_prompts=50)).split(prompt) == [prompt]
