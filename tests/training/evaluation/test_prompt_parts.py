"""Long prompts are cut into parts that say the same, and the answers to the parts are joined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from data.text.templates import ASSISTANT, USER, Template
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import byte_tokenizer, train_tokenizer
from settings.declared import GenerateConfig
from training.evaluation.prompt_parts import PromptParts, was_cut

WORDS = " ".join(f"word{number}" for number in range(60))
SENTENCES = "The king came. " * 3 + "He built the great wall of the town and all that is in it. " + "He went. " * 9
CHINESE = "国王来了。他修建了城墙和城里的一切。" * 8


def parts_of(tokenizer: Tokenizer, most: int, text: str, template: Template | None = None) -> list[str]:
    if template is not None:
        tokenizer.template = template
    parts = PromptParts(tokenizer, tokenizer.template, GenerateConfig(split_prompts=most))
    (ids,) = tokenizer.encode_prompts([tokenizer.template.prompt([(USER, text)])])
    split = parts.split([*ids.tolist(), tokenizer.eos_id])
    assert all(ids[-1] == tokenizer.eos_id and tokenizer.eos_id not in ids[:-1] for ids in split)
    assert len(split) == 1 or max(map(len, split)) <= 1.6 * most + len(tokenizer.template.prompt([(USER, "")]))
    return [tokenizer.decode(ids) for ids in split]


@pytest.mark.parametrize("text", [WORDS, SENTENCES, CHINESE, "a" * 200, "a " + CHINESE.replace("。", "")])
def test_the_parts_say_what_the_prompt_says(text: str) -> None:
    texts = parts_of(byte_tokenizer(), 50, text)
    assert len(texts) > 2 and "".join("".join(texts).split()) == "".join(text.split())
    if text in (WORDS, SENTENCES):
        assert " ".join(texts).split() == text.split()  # no word is cut
    assert parts_of(byte_tokenizer(), 1000, text) == [text]


@pytest.mark.parametrize(
    ("sentence", "most"), [("He built the wall and all of it. ", 100), ("他修建了城墙和城里的一切。", 120)]
)
def test_they_end_where_sentences_end_near_by(sentence: str, most: int) -> None:
    texts = parts_of(byte_tokenizer(), most, sentence * 10)
    assert len(texts) > 2 and all(part.endswith((".", "。")) for part in texts)


@pytest.mark.parametrize(
    "template", [Template(prefix="translate: "), Template.load("chat"), Template.load("Q: {prompt}\\nA:", "t ")]
)
def test_each_part_is_worded_as_the_prompt_was(template: Template) -> None:
    texts = parts_of(byte_tokenizer(), 80, WORDS, template)
    assert len(texts) > 3 and " ".join(map(template.question, texts)) == WORDS
    assert texts == [template.prompt([(USER, template.question(part))]) for part in texts]


def test_a_conversation_stays_whole() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.template = Template.load("chat")
    turns = [(USER, WORDS), (ASSISTANT, "yes"), (USER, WORDS)]
    (ids,) = tokenizer.encode_prompts([tokenizer.template.prompt(turns)])
    prompt = [*ids.tolist(), tokenizer.eos_id]
    assert PromptParts(tokenizer, tokenizer.template, GenerateConfig(split_prompts=50)).split(prompt) == [prompt]


def test_letters_that_the_tokenizer_does_not_know_stay_unknown() -> None:
    tokenizer = train_tokenizer([WORDS] * 20, "words", 200, 2**16)
    (ids,) = tokenizer.encode_prompts([f"{WORDS} never seen {WORDS}"])
    parts = PromptParts(tokenizer, tokenizer.template, GenerateConfig(split_prompts=30)).split(
        [*ids.tolist(), tokenizer.eos_id]
    )
    joined = [number for part in parts for number in part[:-1]]
    assert len(parts) > 3 and tokenizer.unk_id in joined and joined == ids.tolist()


def test_answers_are_joined_and_one_that_was_cut_is_told() -> None:
    tokenizer, settings = byte_tokenizer(), GenerateConfig(split_prompts=50, max_new_tokens=150)
    inputs = [[*ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_prompts([WORDS, "short", SENTENCES])]

    def echo(prompts: list[list[int]]) -> list[list[int]]:
        return [prompt[:-1] for prompt in prompts]

    answers = PromptParts(tokenizer, tokenizer.template, settings).answer_in_parts(inputs, echo)
    assert list(map(tokenizer.decode_answer, answers)) == [WORDS, "short", SENTENCES.strip()]
    assert not any(
        was_cut(answer, settings, tokenizer.eos_id) for answer in answers
    )  # each longer than 150 tokens together
    short = replace(settings, max_new_tokens=20)
    cut = PromptParts(tokenizer, tokenizer.template, short).answer_in_parts(
        inputs, lambda prompts: [ids[:20] for ids in echo(prompts)]
    )
    assert [was_cut(answer, short, tokenizer.eos_id) for answer in cut] == [True, False, True]
