"""Requests in OpenAI's words become prompts and settings; what is wrong is named by its field.

What would change an answer and is not done here is refused; what changes none is ignored, and so are fields of other servers and
clients that are not known here, which are reported.

Source: OpenAI's API reference, chat completions, completions and embeddings; the extra parameters of vLLM, llama.cpp and Ollama.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commands.chat import newest_turns
from commands.embed import Embedder, Tokens
from commands.labelling import Labeller
from data.text.templates import ASSISTANT, SYSTEM, USER, Template, Turn
from data.tokenizers.tokenizer import Tokenizer
from serving.answers import Refused
from settings.declared import GenerateConfig
from tasks.label_outputs import EncodedText
from units import KIB

PackedTokens = tuple[NDArray[np.int32], slice | NDArray[np.int64]]  # `Tokens` in an array

MOST_STOPS, LONGEST_STOP, MOST_CHOICES, MOST_PROMPTS, MOST_INPUTS = 16, 200, 16, 16, 2048
# What a request holds until it is answered, in bytes.
OPEN_BYTES = 64 * KIB  # its connection, and a piece of its answer on the way
PROMPT_TOKEN_BYTES = 40
ANSWER_BYTES = 2 * KIB  # without its tokens
ANSWER_TOKEN_BYTES = 128  # of a token of an answer, its text in Python and in JSON
ROW_BYTES = 512  # of a text and its vector, without their numbers
LABEL_BYTES = 256  # of a label and its probability, in Python and in JSON
NUMBER_BYTES = 128  # of a number of the vector that is being sent, in Python and in JSON
LONGEST_TOKEN = 200  # letters, more than any token has: longer texts are refused before they are encoded
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT}
# fields of an assistant's turn in place of its text, which is null then; a replayed turn of this kind is an empty one here
WORDLESS = ("tool_calls", "function_call", "refusal")
# fields that change no answer here: about the client, the account, caches, speed, and reasoning that this model has none of
IGNORED = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "parallel_tool_calls", "prediction", "verbosity", "priority", "request_id", "provider", "usage",
    "reasoning_effort", "reasoning", "include_reasoning", "separate_reasoning", "enable_thinking", "thinking", "thinking_budget",
    "think", "keep_alive", "num_ctx", "num_thread", "num_gpu", "num_batch", "cache_prompt", "id_slot", "session_id", "chat_id",
    "timings_per_token", "return_progress", "return_token_ids", "spaces_between_special_tokens", "detokenize",
}  # fmt: skip
# field -> the values that ask for nothing; any other would change the answer
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({}, []), "logprobs": (False, 0), "top_logprobs": (0,),
    "prompt_logprobs": (False, 0), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "web_search_options": (), "moderation": (), "echo": (False,), "suffix": ("",), "best_of": (1,), "min_p": (0,), "typical_p": (1,),
    "tfs_z": (1,), "top_a": (0,), "mirostat": (0,), "repeat_penalty": (1,), "length_penalty": (1,), "use_beam_search": (False,),
    "num_beams": (1,), "early_stopping": (False,), "do_sample": (), "min_tokens": (0,), "n_predict": (-1,), "num_predict": (-1,),
    "ignore_eos": (False,), "stop_token_ids": ([],), "bad_words": ([],), "allowed_token_ids": ([],), "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,), "documents": ([],),
    "chat_template": (), "truncate_prompt_tokens": (), "grammar": ("",), "json_schema": ({},), "structured_outputs": ({},),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "options": ({},), "images": ([],),
    "files": ([],), "dry_multiplier": (0,), "xtc_probability": (0,), "dynatemp_range": (0,),
}  # fmt: skip
TAKEN = (
    "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "repetition_penalty",
    "no_repeat_ngram_size", "stop", "stream", "stream_options", "n", "seed", "input_txt", "history", "input", "encoding_format",
    "dimensions",
)  # fmt: skip
# tables that hold further fields
HOLDERS = ("extra_body", "chat_template_kwargs")


@dataclass(frozen=True)
class Asked:
    """One request.

    Args:
        prompts: token ids, with the end token. count: answers to each. how: how their tokens are chosen.
        seed: of the first answer to a prompt; the next has the next. None: the request names none.
        unknown: names of fields that mean nothing here and were ignored.
    """

    prompts: tuple[tuple[int, ...], ...]
    how: GenerateConfig
    count: int = 1
    seed: int | None = None
    stops: tuple[str, ...] = ()
    is_streamed: bool = False
    with_usage: bool = False
    unknown: tuple[str, ...] = ()

    @property
    def held_bytes(self) -> int:
        """What the request holds until it is answered."""
        prompts = sum(len(ids) for ids in self.prompts)
        return request_bytes(prompts, len(self.prompts) * self.count, self.how.max_new_tokens)


def request_bytes(prompt_tokens: int, answers: int, new_tokens: int) -> int:
    """What a request for answers of at most so many tokens each holds until it is answered."""
    return OPEN_BYTES + PROMPT_TOKEN_BYTES * prompt_tokens + answers * (ANSWER_BYTES + ANSWER_TOKEN_BYTES * new_tokens)


@dataclass(frozen=True)
class AskedVectors:
    """One request for vectors.

    Args:
        rows: as `Embedder.tokens` gives them, their ids packed. is_base64: whether numbers are sent so. unknown: fields that were ignored.
    """

    rows: tuple[PackedTokens, ...]
    is_base64: bool
    unknown: tuple[str, ...]

    def held_bytes(self, width: int) -> int:
        """What the request holds until it is answered: ids and vectors, and the numbers of one vector in Python and in JSON."""
        ids = sum(ids.nbytes + (0 if isinstance(own, slice) else own.nbytes) for ids, own in self.rows)
        return OPEN_BYTES + ids + len(self.rows) * (ROW_BYTES + 4 * width) + NUMBER_BYTES * width


@dataclass(frozen=True)
class AskedLabels:
    """One request for labels.

    Args:
        texts: encoded. unknown: fields that were ignored.
    """

    texts: tuple[EncodedText, ...]
    unknown: tuple[str, ...]

    def held_bytes(self, num_labels: int) -> int:
        """What the request holds until it is answered: ids, and the labels or probabilities of each text."""
        tokens = sum(len(text.ids) for text in self.texts)
        labels = tokens + num_labels * len(self.texts)
        return OPEN_BYTES + PROMPT_TOKEN_BYTES * tokens + LABEL_BYTES * labels + ROW_BYTES * len(self.texts)


class Texts:
    """Text to tokens and back, for several threads.

    Args:
        longest: most tokens of a prompt, the end token among them. system: instructions where a request has none.
        embedder: of vectors. labeller: of labels; None: the model has no head over labels.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        longest: int,
        system: str | None = None,
        embedder: Embedder | None = None,
        labeller: Labeller | None = None,
    ) -> None:
        self.embedder = embedder
        self.labeller = labeller
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

    def embedded(self, text: str | Sequence[int], param: str) -> Tokens:
        """A text, or token ids, whose vector is wanted.

        Raises:
            Refused: it is too long, or blank.
        """
        assert self.embedder is not None
        if not isinstance(text, str):
            ids = list(self.given(text, param))
            return ids, slice(0, len(ids) - 1)
        if not text.strip():
            raise Refused(400, f"{param}, is empty; send a text", param)
        self._check_letters(len(text), param)
        with self._lock:
            ids, own = replace(self.embedder, longest=2**62).tokens(text)
        self._ended(ids[:-1], param)
        return ids, own

    def labelled(self, text: str, param: str) -> EncodedText:
        """A text whose label is wanted.

        Raises:
            Refused: it is too long, or blank.
        """
        assert self.labeller is not None
        if not text.strip():
            raise Refused(400, f"{param}, is empty; send a text", param)
        self._check_letters(len(text), param)
        with self._lock:
            encoded = replace(self.labeller, longest=2**62).encode(text)
        self._ended(encoded.ids[:-1], param)
        return encoded

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
    """A body whose fields are taken one by one; what is left in the end is ignored or refused."""

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
        return int(self.take(name, default, lambda x: _is_whole(x) and low <= x <= high, f"{low} to {high}"))

    def end(self) -> tuple[str, ...]:
        """Refuse what would change the answer; names of what is not known.

        Raises:
            Refused: of a field that is known, or nearly so.
        """
        left = self._left
        for choice, tools in (("tool_choice", "tools"), ("function_call", "functions")):
            if left.get(choice) == "none":
                left.pop(tools, None)
        for holder in HOLDERS:
            if isinstance(left.get(holder), dict):
                left |= {name: value for name, value in left.pop(holder).items() if value is not None}
        for name, value in left.items():
            if name in IGNORED:
                continue
            if name in HOLDERS or (name in NEUTRAL and not _is_neutral(value, NEUTRAL[name])) or name in TAKEN:
                raise Refused(
                    400, f"{name} = {str(value)[:100]!r}, is not supported here; omit it", name, "unsupported_parameter"
                )
            if name not in NEUTRAL and (near := get_close_matches(name, TAKEN, 1, 0.8)):
                text = f"{name[:100]}, is not a field of this request; is {near[0]} meant?"
                raise Refused(400, text, name[:100], "unsupported_parameter")
        return tuple(name for name in left if name not in IGNORED and name not in NEUTRAL)


def _is_whole(value: Any) -> bool:
    """Whether a number is whole; clients with one type for all numbers send 100.0."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _is_limit(value: Any) -> bool:
    return _is_whole(value) and (value > 0 or value == -1)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == one and (type(value) is bool) == (type(one) is bool) for one in neutral)


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
    ignored = {f"messages[].{name}" for message in messages for name in WORDLESS if message.get(name)}
    asked = _settings(fields, defaults)
    return replace(asked, prompts=(texts.conversation(turns),), unknown=(*asked.unknown, *sorted(ignored)))


def _turn(message: Any, param: str) -> Turn:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        wrong = "needs a role" if role is None else f"has the role {str(role)[:100]!r}, which is not read here"
        raise Refused(400, f"{param}, {wrong}; allowed: {', '.join(ROLES)}", param)
    content = message.get("content")
    if content is None and role == "assistant" and any(message.get(name) for name in WORDLESS):
        content = ""
    if isinstance(content, list):  # parts, of which text alone can be read
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Refused(400, f"{param}, has a part without text; this model reads only text", param)
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise Refused(400, f"{param}, needs content; allowed: text, or parts of the type text", param)
    return ROLES[role], content


def read_completion(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> Asked:
    """A body of /v1/completions.

    Raises:
        Refused: it is wrong, or asks for what is not done here.
    """
    fields = _Fields(body)
    several = _several(fields, "prompt", "prompts", MOST_PROMPTS)
    asked = _settings(fields, defaults)
    prompts = (texts.plain(one, "prompt") if isinstance(one, str) else texts.given(one, "prompt") for one in several)
    return replace(asked, prompts=tuple(prompts))


def _several(fields: _Fields, param: str, word: str, most: int) -> list[Any]:
    """Texts, or lists of token ids, of which a body may also give a single one."""
    given = fields.take(param, None, lambda x: isinstance(x, (str, list)) and len(x) > 0, "text, or token ids")
    if given is None:
        raise Refused(400, f"{param}, is missing; send a text, or a list of them", param)
    several = given if isinstance(given, list) and not _are_ids(given) else [given]
    if len(several) > most:
        raise Refused(400, f"{param}, are {len(several)} {word}; allowed: {most} in one request", param)
    if not all(isinstance(one, str) or (isinstance(one, list) and one and _are_ids(one)) for one in several):
        raise Refused(400, f"{param}, is none; allowed: text, token ids, or a list of either", param)
    return several


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def read_embeddings(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> AskedVectors:
    """A body of /v1/embeddings.

    Raises:
        Refused: it is wrong, or asks for what is not done here.
    """
    fields = _Fields(body)
    several = _several(fields, "input", "texts", MOST_INPUTS)
    form = fields.take("encoding_format", "float", lambda x: x in ("float", "base64"), "float or base64")
    assert texts.embedder is not None
    width = texts.embedder.width
    fields.whole("dimensions", width, width, width)
    unknown = fields.end()
    rows = (texts.embedded(one, "input") for one in several)
    packed = tuple((np.array(ids, np.int32), own) for ids, own in rows)
    return AskedVectors(packed, form == "base64", unknown)


def read_labels(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> AskedLabels:
    """A body of /v1/classify.

    Raises:
        Refused: it is wrong.
    """
    fields = _Fields(body)
    several = fields.take("input", "", _are_texts, f"a text, or a list of up to {MOST_INPUTS} texts")
    unknown = fields.end()
    rows = [several] if isinstance(several, str) else several
    return AskedLabels(tuple(texts.labelled(one, "input") for one in rows), unknown)


def _are_texts(value: Any) -> bool:
    several = [value] if isinstance(value, str) else value
    is_list = isinstance(several, list) and 0 < len(several) <= MOST_INPUTS
    return is_list and all(isinstance(one, str) for one in several)


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
    unknown = fields.end()
    turns = [turn for question, answer in history for turn in ((USER, question), (ASSISTANT, answer))]
    return Asked((texts.conversation([*turns, (USER, text)], "input_txt"),), defaults, unknown=unknown)


def _is_history(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in value
    )


def _settings(fields: _Fields, defaults: GenerateConfig) -> Asked:
    limit = fields.take("max_tokens", -1, _is_limit, "1 or more")
    limit = int(fields.take("max_completion_tokens", limit, _is_limit, "1 or more"))
    how = replace(
        defaults,
        # -1 is how some clients leave it open; longer answers than the model writes here end with finish_reason "length"
        max_new_tokens=min(limit, defaults.max_new_tokens) if limit > 0 else defaults.max_new_tokens,
        temperature=fields.number("temperature", defaults.temperature, 0.0, 2.0),
        top_p=max(fields.number("top_p", defaults.top_p, 0.0, 1.0), 1e-6),  # 0 asks for the likeliest alone
        top_k=max(fields.whole("top_k", defaults.top_k, -1, 2**31), 0),  # -1 and 0: of all tokens
        repetition_penalty=fields.number("repetition_penalty", defaults.repetition_penalty, 0.01, 100.0),
        no_repeat_ngram_size=fields.whole("no_repeat_ngram_size", defaults.no_repeat_ngram_size, 0, 65536),
    )
    stop = fields.take("stop", [], _is_stop, f"a text, or up to {MOST_STOPS}, of up to {LONGEST_STOP} characters")
    options = fields.take("stream_options", {}, lambda x: isinstance(x, dict), "a table")
    seed = fields.whole("seed", -1, -(2**63), 2**63 - 1)
    return Asked(
        (),
        how,
        count=fields.whole("n", 1, 1, MOST_CHOICES),
        seed=None if seed == -1 else seed,  # -1 asks for any, as in vLLM and llama.cpp
        stops=tuple(text for text in ([stop] if isinstance(stop, str) else stop) if text),  # "" ends nothing
        is_streamed=fields.take("stream", False, lambda x: type(x) is bool, "true or false"),
        with_usage=options.get("include_usage") is True,
        unknown=fields.end(),
    )


def _is_stop(value: Any) -> bool:
    several = [value] if isinstance(value, str) else value
    return (
        isinstance(several, list)
        and len(several) <= MOST_STOPS
        and all(isinstance(one, str) and len(one) <= LONGEST_STOP for one in several)
    )
