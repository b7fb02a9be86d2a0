"""What a body asks for, and how what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data.text.templates import Template
from data.tokenizers.training import byte_tokenizer
from serving.answers import Refused
from serving.asking import AnswerRequest, Texts, read_chat, read_completion, read_question
from settings.declared import GenerateConfig

TOKENIZER = byte_tokenizer()
TEXTS = Texts(TOKENIZER, Template.load("chat"), 64)
DEFAULTS = GenerateConfig(max_new_tokens=24)
QUESTION = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> AnswerRequest:
    return read_chat({"messages": QUESTION, **fields}, TEXTS, DEFAULTS)


def said(request: AnswerRequest) -> list[str]:
    assert all(ids[-1] == TOKENIZER.eos_id for ids in request.prompts)
    return [TOKENIZER.decode(ids) for ids in request.prompts]


@pytest.mark.parametrize("turns", [1, 300])
def test_the_oldest_turns_leave_until_the_rest_fits(turns: int) -> None:
    messages = [
        message
        for number in range(turns)
        for message in ({"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"})
    ]
    (text,) = said(chat(messages=[*messages, {"role": "user", "content": "last"}]))
    assert text.startswith(f"User: q{turns - 1}\n") and text.endswith("User: last\nAssistant:")


def test_settings_are_taken_and_else_those_of_the_server() -> None:
    request = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        max_tokens=5,
        seed=7,
        n=2,
        stop="x",
        stream=True,
        stream_options={"include_usage": True},
        repetition_penalty=1.5,
        no_repeat_ngram_size=2,
    )
    assert request.how == GenerateConfig(
        max_new_tokens=5, temperature=0.5, top_p=0.9, top_k=3, repetition_penalty=1.5, no_repeat_ngram_size=2
    )
    assert (request.seed, request.count, request.stops) == (7, 2, ("x",)) and request.is_streamed and request.with_usage
    plain = chat()
    assert plain.how == DEFAULTS and plain.count == 1 and not plain.stops and not plain.is_streamed
    assert chat(max_completion_tokens=3).how.max_new_tokens == 3
    assert chat().seed is None


# As garak, ChatDev, litellm, Open WebUI, opencode, CodeCompanion, llama.cpp's and vLLM's clients send them.
CHANGES_NOTHING = """
{"user": "me", "metadata": {"a": "b"}, "store": true, "service_tier": "auto", "parallel_tool_calls": false}
{"reasoning_effort": "low", "verbosity": "low", "reasoning": {"effort": "high"}, "model": "gpt-4o", "logprobs": 0}
{"model": "mine", "response_format": {"type": "text"}, "modalities": ["text"], "logit_bias": {}, "echo": false}
{"frequency_penalty": 0, "presence_penalty": 0.0, "n": 1, "stop": ["#", ";"], "temperature": 0.0, "top_p": 1.0}
{"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
{"stop": null, "seed": null, "tools": null, "stream_options": null, "max_tokens": null, "n": null, "nonsense": null}
{"top_k": 0, "min_p": 0, "typical_p": 1.0, "repeat_penalty": 1.0, "mirostat": 0, "seed": -1, "stop": []}
{"max_tokens": -1}
{"chat_template_kwargs": {"enable_thinking": false}, "extra_body": {}}
{"messages": [{"role": "user", "content": "hi", "id": 7, "opts": {"visible": true}, "name": "ann", "tool_calls": null}]}
{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]}
"""


@pytest.mark.parametrize("fields", CHANGES_NOTHING.split("\n")[1:-1])
def test_what_changes_no_answer_is_ignored(fields: str) -> None:
    request = chat(**json.loads(fields))
    assert request.how.max_new_tokens == 24 and request.how.top_k == 0 and request.seed is None and not request.unknown
    assert said(request) == ["User: hi\nAssistant:"]


TOOL = {"type": "function", "function": {"name": "f"}}
# By field, values that are refused.
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -2, "5", True, 1.5],
    "temperature": [2.1, -1, "hot", float("nan"), float("inf")],
    "n": [0, 17],
    "seed": [1.5, 2**63],
    "stop": [["a"] * 17, [7], 7, ["x" * 201]],
    "logprobs": [True, 1],
    "tools": [[TOOL]],
    "tool_choice": ["required", TOOL],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    **{name: [0.5] for name in ["min_p", "temprature"]},
    "messages": [
        [],
        [{"role": "user"}],
        [{"role": "root", "content": "x"}],
        [{"role": "assistant", "content": "x"}],
        [{"role": "tool", "content": "x"}, *QUESTION],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
}


@pytest.mark.parametrize("field", WRONG)
def test_what_is_wrong_is_named_by_its_field(field: str) -> None:
    for value in WRONG[field]:
        with pytest.raises(Refused) as refused:
            chat(**{field: value})
        assert refused.value.status == 400 and str(refused.value.param).startswith(field)
        assert refused.value.text.startswith(str(refused.value.param))
    with pytest.raises(Refused, match=r"^tools"):
        chat(tools=[TOOL], tool_choice="auto")


@pytest.mark.parametrize("text", ["x" * 64, "春" * 30])
def test_a_question_that_is_too_long_is_refused_and_never_cut(text: str) -> None:
    for ask in (
        lambda: chat(messages=[{"role": "user", "content": text}]),
        lambda: read_completion({"prompt": text}, TEXTS, DEFAULTS),
        lambda: read_completion({"prompt": [5] * 64}, TEXTS, DEFAULTS),
        lambda: read_question({"input_txt": text}, TEXTS, DEFAULTS),
    ):
        with pytest.raises(Refused) as refused:
            ask()
        assert refused.value.code == "context_length_exceeded"


def test_the_older_projects_ask_with_input_txt() -> None:
    assert said(read_question({"input_txt": "hi"}, TEXTS, DEFAULTS)) == ["User: hi\nAssistant:"]
    request = read_question({"input_txt": "c", "history": [["a", "b"]]}, TEXTS, DEFAULTS)
    assert said(request) == ["User: a\nAssistant: b\nUser: c\nAssistant:"]
    for wrong, status in (
        ({"input_txt": ""}, 406),
        ({}, 406),
        ({"input_txt": 5}, 400),
        ({"input_txt": "a", "top_k": 1}, 400),
        ({"input_txt": "a", "history": [["a"]]}, 400),
    ):
        with pytest.raises(Refused) as refused:
            read_question(wrong, TEXTS, DEFAULTS)
        assert refused.value.status == status
