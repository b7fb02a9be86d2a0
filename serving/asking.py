"""What does a request ask for? Bodies in OpenAI's words become prompts and settings; what is wrong is named by its field.

What would change an answer and is not done here is refused rather than passed over; fields that change nothing are let be.
Source: OpenAI's API reference, chat completions and completions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from commands.chat import newest_turns
from config import GenerateConfig
from data.text.templates import ASSISTANT, SYSTEM, USER, Template, Turn
from data.tokenizers.tokenizer import Tokenizer

MOST_STOPS, LONGEST_STOP, MOST_CHOICES, MOST_PROMPTS = 4, 200, 16, 16
LONGEST_TOKEN = 200  # letters, more than any token has: longer texts are refused before they are encoded
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT}
# fields that change no answer here
LET_BE = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
}  # fmt: skip
# field -> the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "echo": (False,), "suffix": ("",), "best_of": (1,),
}  # fmt: skip


class Refused(Exception):
    """What is asked for cannot be done.

    Args:
        status: of HTTP. text: what is wrong, for people. param: the field. code: for programs.
    """

    def __init__(self, status: int, text: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.param, self.code = status, text, param, code


@dataclass(frozen=True)
class Asked:
    """One request.

    Args:
        prompts: token ids, with the end token. count: answers to each. how: how their tokens are chosen.
        seed: of the first answer to a prompt; the next has the next. None: the request names none.
    """

    prompts: tuple[tuple[int, ...], ...]
    how: GenerateConfig
    count: int = 1
    seed: int | None = None
    stops: tuple[str, ...] = ()
    is_streamed: bool = False
    with_usage: bool = False


class Texts:
    """Text to tokens and back, for several threads.

    Args:
        longest: most tokens of a prompt, the end token among them. system: instructions where a request has none.
    """

    def __init__(self, tokenizer: Tokenizer, template: Template, longest: int, system: str | None = None) -> None:
        self._tokenizer, self._template, self.longest, self._system = tokenizer, template, longest, system
        self._lock = threading.Lock()  # the library's encoder is changed between texts with and without special tokens

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer."""
        with self._lock:
            return self._tokenizer.decode_answer(ids)

    def conversation(self, turns: list[Turn], param: str = "messages") -> tuple[int, ...]:
        """As many of the newest turns as fit, in the model's template.

        Args:
            turns: the last is the user's; instructions may be among them.
        Raises:
            Refused: the newest question alone is too long.
        """
        rules = "\n".join(text for role, text in turns if role == SYSTEM) or self._system
        spoken = [turn for turn in turns if turn[0] != SYSTEM]
        self._check_letters(len(rules or "") + len(spoken[-1][1]), param)
        with self._lock:
            ids = newest_turns(self._tokenizer, self._template, spoken, rules, self.longest - 1)
        return self._ended(ids, param)

    def plain(self, text: str, param: str) -> tuple[int, ...]:
        """A text as it is; names of sentinels become sentinels.

        Raises:
            Refused: it is too long.
        """
        self._check_letters(len(text), param)
        with self._lock:
            ids = self._tokenizer.encode_prompts([text])[0].tolist()
        return self._ended(ids, param)

    def given(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        """Token ids that a request brings; the end token is added where it is missing."""
        eos, size = self._tokenizer.eos_id, self._tokenizer.size
        if any(not 0 <= number < size for number in ids):
            raise Refused(400, f"{param}: token ids are 0 to {size - 1}", param)
        return self._ended(list(ids[:-1] if ids and ids[-1] == eos else ids), param)

    def _ended(self, ids: list[int], param: str) -> tuple[int, ...]:
        if len(ids) >= self.longest:
            raise self._too_long(f"has {len(ids) + 1:,} tokens with the end token", param)
        return (*ids, self._tokenizer.eos_id)

    def _check_letters(self, letters: int, param: str) -> None:
        if letters > LONGEST_TOKEN * self.longest:
            raise self._too_long(f"has {letters:,} characters", param)

    def _too_long(self, what: str, param: str) -> Refused:
        text = f"This model's maximum context length is {self.longest} tokens; the prompt {what}. Shorten it."
        return Refused(400, text, param, "context_length_exceeded")


class _Fields:
    """A body whose fields are taken one by one; what is left in the end is not understood."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, default: Any, is_right: Callable[[Any], bool], allowed: str) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not is_right(value):
            raise Refused(400, f"{name} = {str(value)[:100]!r}, is not allowed; allowed: {allowed}", name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        return float(
            self.take(name, default, lambda x: type(x) in (int, float) and low <= x <= high, f"{low:g} to {high:g}")
        )

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        return int(self.take(name, default, lambda x: type(x) is int and low <= x <= high, f"{low} to {high}"))

    def switch(self, name: str) -> bool:
        return bool(self.take(name, False, lambda x: type(x) is bool, "true or false"))

    def end(self) -> None:
        for name, value in self._left.items():
            if name in LET_BE or any(type(value) is type(one) and value == one for one in NEUTRAL.get(name, ())):
                continue
            if name in NEUTRAL and type(value) in (int, float) and value in NEUTRAL[name]:
                continue
            known = "is not supported here; leave it out" if name in NEUTRAL else "is no field of this request"
            raise Refused(400, f"{name[:100]}, {known}", name[:100], "unsupported_parameter")


def read_chat(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> Asked:
    """A body of /v1/chat/completions.

    Raises:
        Refused: it is wrong, or asks for what is not done here.
    """
    fields = _Fields(body)
    messages = fields.take("messages", None, lambda x: isinstance(x, list) and len(x) > 0, "a list of messages")
    if messages is None:
        raise Refused(400, "messages, is missing; send a list of messages", "messages")
    turns = [_turn(message, f"messages[{place}]") for place, message in enumerate(messages)]
    if turns[-1][0] != USER:
        raise Refused(400, "messages, must end with the user's; it is to be answered", "messages")
    asked = _settings(fields, defaults)
    return replace(asked, prompts=(texts.conversation(turns),))


def _turn(message: Any, param: str) -> Turn:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(400, f"{param}, needs a role; allowed: {', '.join(ROLES)}", param)
    content = message.get("content")
    if isinstance(content, list):  # parts, of which text alone can be read
        content = "".join(
            part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else _no_text(param)
            for part in content
        )
    if not isinstance(content, str):
        raise Refused(400, f"{param}, needs content; allowed: text, or parts of the type text", param)
    return ROLES[role], content


def _no_text(param: str) -> str:
    raise Refused(400, f"{param}, has a part without text; this model reads text alone", param)


def read_completion(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> Asked:
    """A body of /v1/completions.

    Raises:
        Refused: it is wrong, or asks for what is not done here.
    """
    fields = _Fields(body)
    prompt = fields.take("prompt", None, lambda x: isinstance(x, (str, list)) and len(x) > 0, "text, or token ids")
    if prompt is None:
        raise Refused(400, "prompt, is missing; send a text, or a list of them", "prompt")
    several = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    if len(several) > MOST_PROMPTS:
        raise Refused(400, f"prompt, are {len(several)} prompts; allowed: {MOST_PROMPTS} in one request", "prompt")
    asked = _settings(fields, defaults)
    return replace(asked, prompts=tuple(_prompt(one, texts) for one in several))


def _prompt(one: Any, texts: Texts) -> tuple[int, ...]:
    if isinstance(one, str):
        return texts.plain(one, "prompt")
    if isinstance(one, list) and one and _are_ids(one):
        return texts.given(one, "prompt")
    raise Refused(400, "prompt, is none; allowed: text, token ids, or a list of either", "prompt")


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def read_question(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> Asked:
    """A body of /api/chat: `input_txt`, and where wanted `history`, a list of [question, answer].

    Raises:
        Refused: it is wrong.
    """
    fields = _Fields(body)
    text = fields.take("input_txt", "", lambda x: isinstance(x, str), "text")
    if not text:
        raise Refused(406, "input_txt, is empty; send a question", "input_txt")
    history = fields.take("history", [], _is_history, "a list of [question, answer]")
    fields.end()
    turns = [turn for question, answer in history for turn in ((USER, question), (ASSISTANT, answer))]
    return Asked((texts.conversation([*turns, (USER, text)], "input_txt"),), defaults)


def _is_history(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in value
    )


def _settings(fields: _Fields, defaults: GenerateConfig) -> Asked:
    """What both kinds of requests may set; the prompts are missing yet."""
    most = defaults.max_new_tokens
    limit = fields.whole("max_tokens", most, 1, most)
    how = replace(
        defaults,
        max_new_tokens=fields.whole("max_completion_tokens", limit, 1, most),
        temperature=fields.number("temperature", defaults.temperature, 0.0, 2.0),
        top_p=max(fields.number("top_p", defaults.top_p, 0.0, 1.0), 1e-6),  # 0 asks for the likeliest alone
        top_k=fields.whole("top_k", defaults.top_k, 0, 2**31),
        repetition_penalty=fields.number("repetition_penalty", defaults.repetition_penalty, 0.01, 100.0),
        no_repeat_ngram_size=fields.whole("no_repeat_ngram_size", defaults.no_repeat_ngram_size, 0, 65536),
    )
    stop = fields.take("stop", [], _is_stop, f"a text, or up to {MOST_STOPS}, of 1 to {LONGEST_STOP} characters")
    is_streamed = fields.switch("stream")
    options = fields.take("stream_options", {}, lambda x: isinstance(x, dict) and is_streamed, "a table, with stream")
    asked = Asked(
        (),
        how,
        count=fields.whole("n", 1, 1, MOST_CHOICES),
        seed=fields.take(
            "seed", None, lambda x: type(x) is int and -(2**63) <= x < 2**63, f"{-(2**63)} to {2**63 - 1}"
        ),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        is_streamed=is_streamed,
        with_usage=options.get("include_usage") is True,
    )
    fields.end()
    return asked


def _is_stop(value: Any) -> bool:
    several = [value] if isinstance(value, str) else value
    return (
        isinstance(several, list)
        and len(several) <= MOST_STOPS
        and all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in several)
    )
