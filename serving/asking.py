"""Requests in OpenAI's words become prompts and settings; what is wrong is named by its field.

What would change an answer and is not done here is refused; what changes none is ignored, and so are fields of other
servers and clients that are not known here, which are reported.

Source: OpenAI's API reference, chat completions, completions and embeddings; the extra parameters of vLLM, llama.cpp
and Ollama.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np

from commands.chat import newest_turns
from commands.document_scorer import DocumentScorer
from commands.text_reader import DOCUMENT, NO_PROMPT, QUERY, Embedder, Labeller, Tokens
from data.text.templates import ASSISTANT, SYSTEM, USER, Template, Turn
from data.tokenizers.tokenizer import Tokenizer
from serving.answers import Refused
from settings.declared import GenerateConfig
from support.units import KIB
from tasks.label_outputs import EncodedText

MOST_STOPS = 16
LONGEST_STOP = 200  # characters
MOST_CHOICES = 16
MOST_PROMPTS = 16
MOST_INPUTS = 2048
STOPS_ALLOWED = f"a text, or up to {MOST_STOPS}, of up to {LONGEST_STOP} characters"
# What a request holds until it is answered, in bytes.
OPEN_BYTES = 64 * KIB  # its connection, and a piece of its answer on the way
PROMPT_TOKEN_BYTES = 40
TOKEN_BYTES = 12  # A token of a text whose vector is computed.
ANSWER_BYTES = 2 * KIB  # without its tokens
ANSWER_TOKEN_BYTES = 128  # of a token of an answer, its text in Python and in JSON
ROW_BYTES = 512  # of a text and its vector, without their numbers
LABEL_BYTES = 256  # of a label and its probability, in Python and in JSON
NUMBER_BYTES = 128  # of a number of the vector that is being sent, in Python and in JSON
UNCUT = 2**62  # tokens of a text that is refused, and not cut, where it is too long
LONGEST_TOKEN = 200  # letters, more than any token has: longer texts are refused before they are encoded
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT}
# Fields of an assistant's turn in place of its text, which is null then; a replayed turn of this kind is an empty one
# here.
WORDLESS = ("tool_calls", "function_call", "refusal")
# Tables that hold further fields, which count as fields of the request.
HOLDERS = ("extra_body", "chat_template_kwargs")
# Fields for which -1 is how some clients leave them open.
OPEN = ("max_tokens", "max_completion_tokens", "seed")
SUPPORTED = (
    *OPEN,
    *HOLDERS,
    *("messages", "prompt", "input", "input_txt", "history", "temperature", "top_p", "top_k", "repetition_penalty"),
    *("no_repeat_ngram_size", "stop", "stream", "stream_options", "n", "encoding_format", "dimensions"),
    *("prompt_name", "input_type"),
)
# Fields that name the prompt before texts, as sentence-transformers and as hosted APIs call them: value -> name here.
PROMPT_FIELDS = {
    "prompt_name": {name: name for name in (QUERY, DOCUMENT, NO_PROMPT)},
    "input_type": {"query": QUERY, "document": DOCUMENT, "passage": DOCUMENT},
}
# Fields that change no answer here: about the client, the account, caches, speed, and reasoning that this model has
# none of.
IGNORED = frozenset(
    [
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
        "verbosity",
        "priority",
        "request_id",
        "provider",
        "usage",
        "reasoning_effort",
        "reasoning",
        "include_reasoning",
        "separate_reasoning",
        "enable_thinking",
        "thinking",
        "thinking_budget",
        "think",
        "keep_alive",
        "num_ctx",
        "num_thread",
        "num_gpu",
        "num_batch",
        "cache_prompt",
        "id_slot",
        "session_id",
        "chat_id",
        "timings_per_token",
        "return_progress",
        "return_token_ids",
        "spaces_between_special_tokens",
        "detokenize",
    ]
)
# Fields by the values that ask for nothing; any other value would change the answer.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    """
    frequency_penalty presence_penalty logprobs top_logprobs prompt_logprobs min_p mirostat top_a min_tokens
    dry_multiplier xtc_probability dynatemp_range echo use_beam_search early_stopping ignore_eos
    include_stop_str_in_output continue_final_message
    """: (0, False),
    "best_of typical_p tfs_z repeat_penalty length_penalty num_beams skip_special_tokens add_generation_prompt": (
        1,
        True,
    ),
    "logit_bias tools functions stop_token_ids bad_words allowed_token_ids documents images files": ([], {}),
    "json_schema structured_outputs options suffix grammar": ({}, ""),
    "tool_choice function_call": ("none", "auto"),
    "n_predict num_predict": (-1,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    """
    audio web_search_options moderation do_sample chat_template truncate_prompt_tokens guided_json guided_regex
    guided_choice guided_grammar
    """: (),
}
NEUTRAL = {name: values for names, values in NEUTRAL_VALUES.items() for name in names.split()}


@dataclass(frozen=True)
class AnswerRequest:
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
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def held_bytes(self) -> int:
        """What the request holds until it is answered."""
        return request_bytes(self.tokens, len(self.prompts) * self.count, self.how.max_new_tokens)


def request_bytes(prompt_tokens: int, answers: int, new_tokens: int) -> int:
    """What a request for answers of at most so many tokens each holds until it is answered."""
    return OPEN_BYTES + PROMPT_TOKEN_BYTES * prompt_tokens + answers * (ANSWER_BYTES + ANSWER_TOKEN_BYTES * new_tokens)


@dataclass(frozen=True)
class VectorRequest:
    """One request for vectors.

    Args:
        rows: as `Embedder.tokens` gives them. width: numbers of each vector. is_base64: whether numbers are sent so.
        unknown: fields that were ignored.
    """

    rows: tuple[Tokens, ...]
    width: int
    is_base64: bool
    unknown: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Of all texts."""
        return sum(len(ids) for ids, _ in self.rows)

    def held_bytes(self, width: int) -> int:
        """What the request holds until it is answered: ids and vectors, and the numbers of one vector in Python and in
        JSON.
        """
        # Token ids of 4 bytes, and of prepared texts the place of each in 8.
        return OPEN_BYTES + TOKEN_BYTES * self.tokens + len(self.rows) * (ROW_BYTES + 4 * width) + NUMBER_BYTES * width


@dataclass(frozen=True)
class LabelRequest:
    """One request for labels.

    Args:
        texts: encoded. unknown: fields that were ignored.
    """

    texts: tuple[EncodedText, ...]
    unknown: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Of all texts."""
        return sum(len(text.ids) for text in self.texts)

    def held_bytes(self, num_labels: int) -> int:
        """What the request holds until it is answered: ids, and the labels or probabilities of each text."""
        labels = self.tokens + num_labels * len(self.texts)
        return OPEN_BYTES + PROMPT_TOKEN_BYTES * self.tokens + LABEL_BYTES * labels + ROW_BYTES * len(self.texts)


class Texts:
    """Text to tokens and back, for several threads.

    Args:
        longest: most tokens of a prompt, the end token among them. system: instructions where a request has none.
        embedder: of vectors. labeller: of labels; None: the model has no head over labels.
        scorer: of documents; None: the model does not say how relevant they are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        longest: int,
        system: str | None = None,
        embedder: Embedder | None = None,
        labeller: Labeller | None = None,
        scorer: DocumentScorer | None = None,
    ) -> None:
        self.embedder = embedder
        self.labeller = labeller
        self.scorer = scorer
        self._tokenizer = tokenizer
        self._template = template
        self.longest = longest
        self._system = system
        self._lock = threading.Lock()  # The library's encoder is changed between texts with and without special tokens.

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

    def plain(self, text: str | Sequence[int], param: str) -> tuple[int, ...]:
        """A text as it is, or token ids; names of sentinels become sentinels.

        Raises:
            Refused: it is too long, or there is no such token.
        """
        if not isinstance(text, str):
            return self.given(text, param)
        self._check_letters(len(text), param)
        with self._lock:
            ids = self._tokenizer.encode_prompts([text])[0].tolist()
        return self._ended(ids, param)

    def embedded(self, text: str | Sequence[int], param: str, prompt_name: str | None = None) -> Tokens:
        """A text, or token ids, whose vector is wanted.

        Args:
            prompt_name: of the prompt before a text, see `Embedder`; ids are read as they are.
        Raises:
            Refused: it is too long, or blank.
        """
        assert self.embedder is not None
        if not isinstance(text, str):
            ids = np.array(self.given(text, param), np.int32)
            return ids, slice(0, len(ids) - 1)
        self._check_text(text, param)
        with self._lock:
            ids, own = self.embedder.tokens(text, UNCUT, prompt_name)
        self._check_length(len(ids), param)
        return ids, own

    def labelled(self, text: str, param: str) -> EncodedText:
        """A text whose label is wanted.

        Raises:
            Refused: it is too long, or blank.
        """
        assert self.labeller is not None
        self._check_text(text, param)
        with self._lock:
            encoded = self.labeller.encode(text, UNCUT)
        self._check_length(len(encoded.ids), param)
        return encoded

    def scored(self, query: str, documents: Sequence[str], longest_document: int = UNCUT) -> list[EncodedText]:
        """A query with each of some documents; what is too long of a document is left out.

        Args:
            longest_document: tokens of a document.
        Raises:
            Refused: the query leaves no room for a document.
        """
        assert self.scorer is not None
        self._check_letters(len(query), "query")
        most_letters = LONGEST_TOKEN * self.longest
        with self._lock:
            query_tokens = len(self.scorer.encode_document(query, "", UNCUT).ids)
        self._check_length(query_tokens, "query")
        longest = min(self.longest, query_tokens + longest_document)
        encoded = []
        for document in documents:
            with self._lock:
                encoded.append(self.scorer.encode_document(query, document[:most_letters], longest))
        return encoded

    def given(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        """Token ids that a request brings; the end token is added where it is missing."""
        size = self._tokenizer.size
        if min(ids) < 0 or max(ids) >= size:
            raise Refused(400, f"{param}: token ids are 0 to {size - 1}", param)
        return self._ended(list(ids[:-1] if ids[-1] == self._tokenizer.eos_id else ids), param)

    def _ended(self, ids: list[int], param: str) -> tuple[int, ...]:
        self._check_length(len(ids) + 1, param)
        return (*ids, self._tokenizer.eos_id)

    def _check_length(self, tokens: int, param: str) -> None:
        if tokens > self.longest:
            raise self._too_long(f"has {tokens:,} tokens with the end token", param)

    def _check_text(self, text: str, param: str) -> None:
        if not text.strip():
            raise Refused(400, f"{param}, is empty; send a text", param)
        self._check_letters(len(text), param)

    def _check_letters(self, letters: int, param: str) -> None:
        if letters > LONGEST_TOKEN * self.longest:
            raise self._too_long(f"has {letters:,} characters", param)

    def _too_long(self, what: str, param: str) -> Refused:
        text = f"This model's maximum context length is {self.longest} tokens; the prompt {what}. Shorten it."
        return Refused(400, text, param, "context_length_exceeded")


class Fields:
    """A body whose fields are taken one by one; what nobody has taken in the end is ignored or refused."""

    def __init__(self, body: dict[str, Any]) -> None:
        fields = dict(body)
        for holder in HOLDERS:
            if isinstance(body.get(holder), dict):
                del fields[holder]
                fields |= body[holder]
        empty: dict[str, tuple[Any, ...]] = dict.fromkeys(OPEN, (None, -1))
        self._fields = {name: value for name, value in fields.items() if value not in empty.get(name, (None,))}

    def take(
        self,
        name: str,
        default: Any,
        allowed: str,
        is_right: Callable[[Any], bool],
        read: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """The value of a field.

        Args:
            default: where the body has none. allowed: values, in words. read: makes the result of a right value.
        Raises:
            Refused: the value is not right.
        """
        value = self._fields.pop(name, None)
        if value is None:
            return default
        if not is_right(value):
            raise Refused(400, f"{name} = {str(value)[:100]!r}, is not allowed; allowed: {allowed}", name)
        return read(value)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        number: float = self.take(name, default, f"{low:g} to {high:g}", lambda x: _is_between(x, low, high), float)
        return number

    def whole(self, name: str, default: int | None, low: int, high: int) -> Any:
        """A whole number; clients with one type for all numbers send 100.0."""
        return self.take(
            name, default, f"{low} to {high}", lambda x: _is_between(x, low, high) and float(x).is_integer(), int
        )

    def texts(self, name: str, allowed: str, most: int, longest: float = math.inf) -> list[str]:
        """A text or a list of texts.

        Args:
            longest: characters of each.
        """

        def is_right(value: Any) -> bool:
            texts = _listed(value)
            return len(texts) <= most and all(isinstance(text, str) and len(text) <= longest for text in texts)

        texts: list[str] = self.take(name, [], allowed, is_right, _listed)
        return texts

    def prompts(self, name: str, most: int) -> list[Any]:
        """Texts, or lists of token ids, of which a body may also give a single one."""
        allowed = f"a text, token ids, or a list of up to {most} of either"

        def several(value: Any) -> list[Any]:
            return [value] if _are_ids(value) else _listed(value)

        def is_right(value: Any) -> bool:
            prompts = several(value)
            return len(prompts) <= most and all(isinstance(one, str) or _are_ids(one) for one in prompts)

        prompts: list[Any] = self.take(name, [], allowed, is_right, several)
        if not prompts:
            raise Refused(400, f"{name}, is missing; send {allowed}", name)
        return prompts

    def end(self, supported: Sequence[str] = SUPPORTED) -> tuple[str, ...]:
        """Refuse what would change the answer; names of what is not known.

        Args:
            supported: fields that a misspelt one may mean.
        Raises:
            Refused: of a field that is known, or nearly so.
        """
        fields = self._fields
        for choice, tools in (("tool_choice", "tools"), ("function_call", "functions")):
            if fields.get(choice) == "none":
                fields.pop(tools, None)
        unknown = [name for name in fields if name not in IGNORED and fields[name] not in NEUTRAL.get(name, ())]
        for name in unknown:
            if name in NEUTRAL or name in supported:
                text = f"{name} = {str(fields[name])[:100]!r}, is not supported here; omit it"
                raise Refused(400, text, name, "unsupported_parameter")
            near = get_close_matches(name, supported, 1, 0.8)
            if near:
                text = f"{name[:100]}, is not a field of this request; is {near[0]} meant?"
                raise Refused(400, text, name[:100], "unsupported_parameter")
        return tuple(unknown)


def _is_between(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _listed(value: Any) -> list[Any]:
    """The values of a list; a single value as a list of it."""
    return value if isinstance(value, list) else [value]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and {type(number) for number in value} == {int}


def read_chat(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> AnswerRequest:
    """A body of /v1/chat/completions.

    Raises:
        Refused: it is wrong, or asks for what is not done here.
    """
    fields = Fields(body)
    messages: list[Any] = fields.take("messages", [], "a list of messages", lambda x: isinstance(x, list))
    turns = [_turn(message, f"messages[{number}]") for number, message in enumerate(messages)]
    if not turns or turns[-1][0] != USER:
        raise Refused(400, "messages, must end with the user's; it is to be answered", "messages")
    ignored = {f"messages[].{name}" for message in messages for name in WORDLESS if message.get(name)}
    parsed = _settings(fields, defaults)
    return replace(parsed, prompts=(texts.conversation(turns),), unknown=(*parsed.unknown, *sorted(ignored)))


def _turn(message: Any, param: str) -> Turn:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in list(ROLES):  # It may be what no set can hold.
        raise Refused(400, f"{param}, has the role {str(role)[:100]!r}; allowed: {', '.join(ROLES)}", param)
    content = message.get("content")
    if content is None and any(message.get(name) for name in WORDLESS):
        content = ""
    # Of a list of parts, text alone can be read.
    parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in _listed(content)]
    if not all(isinstance(part, str) for part in parts):
        raise Refused(400, f"{param}, needs content; allowed: text, or parts of the type text", param)
    return ROLES[str(role)], "".join(parts)


def read_completion(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> AnswerRequest:
    """A body of /v1/completions.

    Raises:
        Refused: it is wrong, or asks for what is not done here.
    """
    fields = Fields(body)
    prompts = fields.prompts("prompt", MOST_PROMPTS)
    parsed = _settings(fields, defaults)
    return replace(parsed, prompts=tuple(texts.plain(prompt, "prompt") for prompt in prompts))


def read_embeddings(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> VectorRequest:
    """A body of /v1/embeddings.

    Raises:
        Refused: it is wrong, or asks for what is not done here.
    """
    embedder = texts.embedder
    assert embedder is not None
    fields = Fields(body)
    prompts = fields.prompts("input", MOST_INPUTS)
    form = fields.take("encoding_format", "float", "float or base64", lambda x: x in ("float", "base64"))
    width = fields.whole("dimensions", embedder.width, 1 if embedder.has_head else embedder.width, embedder.width)
    name = None
    if embedder.has_head:
        for field, names in PROMPT_FIELDS.items():
            name = fields.take(field, name, ", ".join(names), lambda x, names=names: x in list(names), names.get)
    unknown = fields.end()
    rows = tuple(texts.embedded(prompt, "input", name) for prompt in prompts)
    return VectorRequest(rows, width, form == "base64", unknown)


def read_labels(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> LabelRequest:
    """A body of /v1/classify.

    Raises:
        Refused: it is wrong.
    """
    fields = Fields(body)
    rows = fields.texts("input", f"a text, or a list of up to {MOST_INPUTS} texts", MOST_INPUTS) or [""]
    unknown = fields.end()
    return LabelRequest(tuple(texts.labelled(row, "input") for row in rows), unknown)


def read_question(body: dict[str, Any], texts: Texts, defaults: GenerateConfig) -> AnswerRequest:
    """A body of /api/chat: `input_txt`, and where wanted `history`, a list of [question, answer].

    Raises:
        Refused: it is wrong.
    """
    fields = Fields(body)
    question = fields.take("input_txt", "", "text", lambda x: isinstance(x, str))
    if not question:
        raise Refused(406, "input_txt, is empty; send a question", "input_txt")
    history = fields.take("history", [], "a list of [question, answer]", _is_history)
    unknown = fields.end()
    turns = [turn for pair in history for turn in zip((USER, ASSISTANT), pair, strict=True)]
    return AnswerRequest((texts.conversation([*turns, (USER, question)], "input_txt"),), defaults, unknown=unknown)


def _is_history(value: Any) -> bool:
    return isinstance(value, list) and all([type(text) for text in _listed(pair)] == [str, str] for pair in value)


def _settings(fields: Fields, defaults: GenerateConfig) -> AnswerRequest:
    # Longer answers than the model writes here end with finish_reason "length".
    longest = fields.whole("max_tokens", defaults.max_new_tokens, 1, 2**63)
    longest = fields.whole("max_completion_tokens", longest, 1, 2**63)
    how = replace(
        defaults,
        max_new_tokens=min(longest, defaults.max_new_tokens),
        temperature=fields.number("temperature", defaults.temperature, 0.0, 2.0),
        top_p=max(fields.number("top_p", defaults.top_p, 0.0, 1.0), 1e-6),  # 0 asks for the likeliest alone.
        top_k=max(fields.whole("top_k", defaults.top_k, -1, 2**31), 0),  # -1 and 0: of all tokens.
        repetition_penalty=fields.number("repetition_penalty", defaults.repetition_penalty, 0.01, 100.0),
        no_repeat_ngram_size=fields.whole("no_repeat_ngram_size", defaults.no_repeat_ngram_size, 0, 65536),
    )
    options = fields.take("stream_options", {}, "a table", lambda x: isinstance(x, dict))
    return AnswerRequest(
        (),
        how,
        count=fields.whole("n", 1, 1, MOST_CHOICES),
        seed=fields.whole("seed", None, -(2**63), 2**63 - 1),
        stops=tuple(filter(None, fields.texts("stop", STOPS_ALLOWED, MOST_STOPS, LONGEST_STOP))),  # "" ends nothing.
        is_streamed=fields.take("stream", False, "true or false", lambda x: type(x) is bool),
        with_usage=options.get("include_usage") is True,
        unknown=fields.end(),
    )
