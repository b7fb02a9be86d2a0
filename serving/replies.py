"""Answers and errors in OpenAI's form.

Source: OpenAI's API reference: the chat completion object and its chunk, the completion object, errors.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
END = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Finished:
    """One whole answer: its text, why it ended, and its tokens."""

    text: str
    end: str
    tokens: int


@dataclass(frozen=True)
class Form:
    """How the answers of one request are written.

    Args:
        is_chat: chat completions, else completions. model: the name they bear.
    """

    is_chat: bool
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def _frame(self, choices: list[dict[str, Any]], is_part: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if is_part else "chat.completion") if self.is_chat else "text_completion"
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def whole(self, finished: Sequence[Finished], prompt_tokens: int) -> dict[str, Any]:
        """All answers at once."""
        choices = [
            {
                "index": index,
                **({"message": {"role": "assistant", "content": one.text}} if self.is_chat else {"text": one.text}),
                "logprobs": None,
                "finish_reason": one.end,
            }
            for index, one in enumerate(finished)
        ]
        return self._frame(choices, False) | {"usage": usage(prompt_tokens, sum(one.tokens for one in finished))}

    def head(self, index: int) -> bytes:
        """The first event of an answer, which says who speaks; completions have none."""
        return self._event(index, {"delta": {"role": "assistant", "content": ""}}) if self.is_chat else b""

    def part(self, index: int, text: str) -> bytes:
        """An event with more text."""
        return self._event(index, {"delta": {"content": text}} if self.is_chat else {"text": text})

    def tail(self, index: int, end: str) -> bytes:
        """The event that says why an answer has ended."""
        return self._event(index, {"delta": {}} if self.is_chat else {"text": ""}, end)

    def count(self, prompt_tokens: int, written: int) -> bytes:
        """The event behind all answers that counts their tokens."""
        return event(self._frame([], True) | {"usage": usage(prompt_tokens, written)})

    def _event(self, index: int, content: dict[str, Any], end: str | None = None) -> bytes:
        return event(self._frame([{"index": index, **content, "logprobs": None, "finish_reason": end}], True))


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def usage(prompt_tokens: int, written: int) -> dict[str, int]:
    """Counts of tokens."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}


def problem(status: int, text: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """What went wrong, as clients read it."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def refusal(
    status: int, text: str, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a request that cannot be done."""
    return JSONResponse(problem(status, text, param, code), status, dict(headers or {}))
