"""Answers and errors in OpenAI's form.

Source: OpenAI's API reference: the chat completion object and its chunk, the completion object, errors.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from starlette.responses import JSONResponse, Response

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
END = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Finished:
    """One whole answer: its text, why it ended, and its tokens."""

    text: str
    end: str
    tokens: int


@dataclass(frozen=True)
class Form:
    """How the answers of one request are written: as completions.

    Args:
        model: the name they bear.
    """

    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    path: ClassVar[str] = "/v1/completions"
    prefix: ClassVar[str] = "cmpl"
    whole_kind: ClassVar[str] = "text_completion"
    part_kind: ClassVar[str] = "text_completion"

    def whole(self, finished: Sequence[Finished], prompt_tokens: int) -> dict[str, Any]:
        """All answers at once."""
        choices = [self._choice(index, self._content(one.text), one.end) for index, one in enumerate(finished)]
        written = sum(one.tokens for one in finished)
        return {**self._frame(self.whole_kind, choices), "usage": usage(prompt_tokens, written)}

    def head(self, index: int) -> bytes:
        """The first event of an answer, which says who speaks; completions have none."""
        return b""

    def part(self, index: int, text: str) -> bytes:
        """An event with more text."""
        return self._event(index, self._new(text))

    def tail(self, index: int, end: str) -> bytes:
        """The event that says why an answer has ended."""
        return self._event(index, self._nothing(), end)

    def count(self, prompt_tokens: int, written: int) -> bytes:
        """The event behind all answers that counts their tokens."""
        return event({**self._frame(self.part_kind, []), "usage": usage(prompt_tokens, written)})

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _new(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _nothing(self) -> dict[str, Any]:
        return {"text": ""}

    def _event(self, index: int, content: dict[str, Any], end: str | None = None) -> bytes:
        return event(self._frame(self.part_kind, [self._choice(index, content, end)]))

    def _choice(self, index: int, content: dict[str, Any], end: str | None) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": end}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"{self.prefix}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class ChatForm(Form):
    """The same as chat completions."""

    path: ClassVar[str] = "/v1/chat/completions"
    prefix: ClassVar[str] = "chatcmpl"
    whole_kind: ClassVar[str] = "chat.completion"
    part_kind: ClassVar[str] = "chat.completion.chunk"

    def head(self, index: int) -> bytes:
        return self._event(index, {"delta": {"role": "assistant", "content": ""}})

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _new(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _nothing(self) -> dict[str, Any]:
        return {"delta": {}}


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def usage(prompt_tokens: int, written: int) -> dict[str, int]:
    """Counts of tokens."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}


def problem(status: int, text: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """What went wrong, as clients read it."""
    kind = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def refusal(
    status: int, text: str, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a request that cannot be done."""
    return JSONResponse(problem(status, text, param, code), status, headers)
