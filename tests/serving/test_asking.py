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


def test_a_conversation_is_put_into_the_models_template() -> None:
    turns = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert said(chat(messages=turns)) == ["be kind\nUser: a\nAssistant: b\nUser: c\nAssistant:"]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("instead", [{"tool_calls": [CALL]}, {"refusal": "no"}, {"function_call": CALL["function"]}])
def test_a_replayed_turn_without_text_is_an_empty_one_and_says_what_is_ignored(instead: dict[str, Any]) -> None:
    request = chat(messages=[*QUESTION, {"role": "assistant", "content": None, **instead}, *QUESTION])
    assert said(request) == ["User: hi\nAssistant: \nUser: hi\nAssistant:"]
    assert request.unknown == tuple(f"messages[].{name}" for name in instead)
    with pytest.raises(Refused, match=r"messages\[2\], has the role 'tool'"):
        chat(messages=[*QUESTION, {"role": "assistant", **instead}, {"role": "tool", "content": "1"}, *QUESTION])


@pytest.mark.parametrize("turns", [1, 9, 300])
def test_the_oldest_turns_leave_until_the_rest_fits(turns: int) -> None:
    messages = [
        message
        for number in range(turns)
        for message in ({"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"})
    ]
    (text,) = said(chat(messages=[*messages, {"role": "user", "content": "last"}]))
    assert text.startswith(f"User: q{turns - 1}\n") and text.endswith("User: last\nAssistant:")


@pytest.mark.parametrize(
    ("prompt", "texts"), [("a b", ["a b"]), (["a", "b"], ["a", "b"]), ([100, 101], None), ([[100], [101, 1]], None)]
)
def test_prompts_are_texts_or_token_ids(prompt: object, texts: list[str] | None) -> None:
    request = read_completion({"prompt": prompt}, TEXTS, DEFAULTS)
    if texts is not None:
        assert said(request) == texts, "as they are, without a template"
    else:
        assert [ids[-1] for ids in request.prompts] == [1] * len(request.prompts)
        assert all(1 not in ids[:-1] for ids in request.prompts)


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
{"tools": []}
{"tools": [], "tool_choice": "none"}
{"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
{"tool_choice": "auto"}
{"functions": [], "function_call": "auto"}
{"logprobs": false, "top_logprobs": 0, "best_of": 1, "suffix": "", "top_p": 0, "top_k": -1, "min_p": 0.0, "n": 1.0}
{"stop": null, "seed": null, "tools": null, "stream_options": null, "max_tokens": null, "n": null, "nonsense": null}
{"logprobs": null, "temperature": null}
{"top_k": 0, "min_p": 0, "typical_p": 1.0, "repeat_penalty": 1.0, "mirostat": 0, "seed": -1, "stop": []}
{"stream": false, "stream_options": {"include_usage": true}}
{"max_tokens": 4096}
{"max_completion_tokens": 1000000000000}
{"max_tokens": -1}
{"max_tokens": 24.0}
{"max_tokens": 5, "max_completion_tokens": 50}
{"ignore_eos": false, "skip_special_tokens": true, "min_tokens": 0, "use_beam_search": false}
{"add_generation_prompt": true}
{"chat_template_kwargs": {"enable_thinking": false}, "extra_body": {}}
{"prediction": {"type": "content", "content": "x"}}
{"num_ctx": 4096, "keep_alive": "5m", "chat_id": "1", "cache_prompt": true}
{"messages": [{"role": "user", "content": "hi", "id": 7, "opts": {"visible": true}, "name": "ann", "tool_calls": null}]}
{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]}
"""


@pytest.mark.parametrize("fields", CHANGES_NOTHING.split("\n")[1:-1])
def test_what_changes_no_answer_is_ignored(fields: str) -> None:
    request = chat(**json.loads(fields))
    assert request.how.max_new_tokens == 24 and request.how.top_k == 0 and request.seed is None and not request.unknown
    assert said(request) == ["User: hi\nAssistant:"]


def test_fields_that_are_not_known_are_ignored_and_reported() -> None:
    request = chat(nonsense=1, features={"web": False}, chat_template_kwargs={"colour": "red"}, seed=-5)
    assert set(request.unknown) == {"nonsense", "features", "colour"} and request.seed == -5


TOOL = {"type": "function", "function": {"name": "f"}}
# By field, values that are refused.
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -2, "5", True, 1.5],
    "max_completion_tokens": [0],
    "temperature": [2.1, -1, "hot", float("nan"), float("inf")],
    "top_p": [1.5],
    "n": [0, 17],
    "seed": [1.5, 2**63],
    "stop": [["a"] * 17, [7], 7, ["x" * 201]],
    "stream": [1],
    "stream_options": [5],
    "top_k": [-2],
    "logprobs": [True, 1],
    "logit_bias": [{"5": 1}],
    "tools": [[TOOL]],
    "functions": [[{}]],
    "tool_choice": ["required", TOOL],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "modalities": [["text", "audio"]],
    "chat_template_kwargs": [5],
    **{name: [5] for name in ["top_logprobs", "best_of", "min_tokens", "num_beams", "n_predict", "max_new_tokens"]},
    **{name: [0.5] for name in ["min_p", "frequency_penalty", "presence_penalty", "repeat_penalty", "temprature"]},
    **{name: [True] for name in ["echo", "ignore_eos"]},
    **{name: ["x"] for name in ["suffix", "chat_template", "stops"]},
    **{name: [{}] for name in ["web_search_options", "guided_json"]},
    "messages": [
        [],
        "hi",
        ["x"],
        [{"role": "user"}],
        [{"role": "root", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "assistant", "content": "x"}],
        [{"role": "system", "content": "x"}],
        [{"role": "tool", "content": "x"}, *QUESTION],
        [{"role": "assistant", "content": None, "tool_calls": [], "refusal": None}, *QUESTION],
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


@pytest.mark.parametrize("text", ["x" * 64, "x" * 1_000_000, "春" * 30])
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
