"""What a program cannot do of how a model answers here, and what to do there instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from data.text.proteins import example
from data.text.templates import Template
from support.language import say

# Setting -> what CTranslate2's `translate_batch` calls it.
_CTRANSLATE2 = {
    "num_beams": "beam_size",
    "length_penalty": "length_penalty",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "min_new_tokens": "min_decoding_length",
    "max_new_tokens": "max_decoding_length",
    "temperature": "sampling_temperature",
    "top_k": "sampling_topk",
    "top_p": "sampling_topp",
}
# Setting -> llama.cpp's flag.
_LLAMA_CPP = {
    "repetition_penalty": "--repeat-penalty",
    "max_new_tokens": "-n",
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
}


def decoding_words(form: str, settings: Mapping[str, Any]) -> list[str]:
    """How a program decodes as the model does here, in its own words, such as `beam_size=1` or `--temp 0.0`.

    Args:
        form: the format. settings: for decoding, that the model's folder publishes.
    Returns:
        none for ONNX, whose programs read them from the folder.
    """
    if form == "ctranslate2":
        settings = {"num_beams": 1, **settings}  # CTranslate2 would search with two beams.
        return [f"{_CTRANSLATE2[name]}={value}" for name, value in settings.items() if name in _CTRANSLATE2]
    if form == "gguf":
        settings = {"temperature": 0.0, **settings}  # llama.cpp would sample.
        return [f"{_LLAMA_CPP[name]} {value}" for name, value in settings.items() if name in _LLAMA_CPP]
    return []


def runtime_notes(form: str, settings: Mapping[str, Any], has_answer_list: bool) -> Iterator[str]:
    """Sentences on what a program does otherwise than the model here, none where there is nothing to say.

    Args:
        form: the format. settings: for decoding, that the model's folder publishes.
        has_answer_list: whether all answers come from a list.
    """
    searches = settings.get("num_beams", 1) > 1
    if form in ("onnx", "web"):
        if searches:
            text = (
                "transformers.js has no beam search: it answers greedily, whatever num_beams says; Optimum searches. "
                "See with --num_beams=1 what greedy answers are worth"
            )
            yield say(text)
        if settings.get("top_p", 1.0) < 1.0:
            yield say("transformers.js has no top_p: it samples from all top_k tokens; Optimum heeds it")
        if has_answer_list:
            text = (
                "answers.txt, is heeded by neither transformers.js nor Optimum, which may answer anything: give "
                "generate() of Optimum prefix_allowed_tokens_fn, and that of transformers.js a logits_processor which "
                "allows the next tokens of the list, or compare the answer with the list"
            )
            yield say(text)
    elif form == "ctranslate2":
        yield _to_be_named("CTranslate2", "translate_batch(...)", decoding_words(form, settings))
        if has_answer_list:
            text = (
                "answers.txt, is not heeded by CTranslate2, which may answer anything: score each line of the list by "
                "score_batch and take the best"
            )
            yield say(text)
    elif form == "gguf":
        yield _to_be_named("llama.cpp", "llama-completion", decoding_words(form, settings))
        missing = [name for name in ("num_beams", "no_repeat_ngram_size", "min_new_tokens") if name in settings]
        if missing:
            text = (
                "llama.cpp has no {settings}; see here what answers without them are worth, or use --format=ctranslate2"
            )
            yield say(text, settings=", ".join(missing))
        if has_answer_list:
            text = (
                "answers.txt, is not heeded by llama.cpp, which may answer anything: give it a grammar of the list's "
                "lines (--grammar)"
            )
            yield say(text)
    if settings.get("split_prompts"):
        text = "split_prompts = {value}, is done by this program alone: split long prompts before, and join the answers"
        yield say(text, value=settings["split_prompts"])


def prompt_notes(form: str, prompts: Iterable[str | None]) -> Iterator[str]:
    """A sentence on the prompts before texts whose vectors are compared, none where there are none.

    Args:
        form: the format, whose page puts them there by itself.
        prompts: before queries, and before documents.
    """
    shown = ", ".join(repr(prompt) for prompt in prompts if prompt)
    if shown and form != "web":
        yield say(
            "prompts are put before texts by this program alone: write them there yourself ({prompts})", prompts=shown
        )


def text_notes(form: str, template: Template, prepare_text: str) -> Iterator[str]:
    """Sentences on what is done to a text before it is tokenized, none where nothing is.

    Args:
        form: the format, whose page words questions by itself.
        template: by which questions are worded. prepare_text: the setting of that name.
    """
    before, after = template.text_around_question()
    before = template.prefix + before
    if (before or after) and form != "web":
        text = "questions are worded by this program alone: write {before} before them and {after} behind them there"
        yield say(text, before=repr(before), after=repr(after))
    if prepare_text != "none":
        original, prepared = example(prepare_text)
        text = (
            "texts are prepared by this program alone (--prepare_text={prepare_text}): give {prepared} in place of "
            "{original} there"
        )
        yield say(text, prepare_text=prepare_text, prepared=prepared, original=original)


def _to_be_named(program: str, call: str, words: Iterable[str]) -> str:
    """A sentence on settings that a program has under its own names, and reads from no file."""
    text = "{program} reads no generation settings from the folder; name them to {call}: {words}"
    return say(text, program=program, call=call, words=", ".join(words))
