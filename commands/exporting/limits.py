"""What a program cannot do of how a model answers here, and what to do there instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
        if has_answer_list:
            text = (
                "answers.txt, is heeded by neither transformers.js nor Optimum, which may answer anything: give "
                "generate() of Optimum prefix_allowed_tokens_fn, and that of transformers.js a logits_processor which "
                "allows the next tokens of the list, or compare the answer with the list"
            )
            yield say(text)
    elif form == "ctranslate2":
        yield from _to_be_named(settings, _CTRANSLATE2, "CTranslate2", "translate_batch(...)")
        if has_answer_list:
            text = (
                "answers.txt, is not heeded by CTranslate2, which may answer anything: score each line of the list by "
                "score_batch and take the best"
            )
            yield say(text)
    elif form == "gguf":
        yield from _to_be_named({"temperature": 0.0, **settings}, _LLAMA_CPP, "llama.cpp", "llama-completion")
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


def _to_be_named(settings: Mapping[str, Any], names: Mapping[str, str], program: str, call: str) -> Iterator[str]:
    """Settings that a program has under its own names, and reads from no file."""
    words = []
    for name, value in settings.items():
        if name in names:
            own = names[name]
            words.append(f"{own} {value}" if own.startswith("-") else f"{own}={value}")
    if words:
        text = "{program} reads no generation settings from the folder; name them to {call}: {words}"
        yield say(text, program=program, call=call, words=", ".join(words))
