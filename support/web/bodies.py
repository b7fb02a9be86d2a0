"""Request bodies: one JSON object of bounded size, within bounded time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

BODY_BYTES = 2**20
BODY_SECONDS = 60.0


class ByteBudget:
    """Memory that requests share; each takes its part before it is used, such as the bytes that a body announces.

    Args:
        total_bytes: of all together.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes

    @contextmanager
    def reserve(self, size: int) -> Iterator[Reservation]:
        """Reserve `size` bytes until the end of the block, and what is taken in it.

        Raises:
            HTTPException: others have it (429).
        """
        reservation = Reservation(self)
        reservation.take(size)
        try:
            yield reservation
        finally:
            self.free_bytes += reservation.bytes


class Reservation:
    """What one request holds of a `ByteBudget`."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.bytes = 0

    def take(self, size: int) -> None:
        """Reserve more.

        Raises:
            HTTPException: others have it (429), or there is not so much at all (413).
        """
        if size > self.budget.total_bytes:
            raise HTTPException(413, f"needs {size:,} bytes of memory; requests have {self.budget.total_bytes:,} here")
        if size > self.budget.free_bytes:
            raise HTTPException(429, "other requests hold the memory that this one needs; come again")
        self.budget.free_bytes -= size
        self.bytes += size


def announced_bytes(request: Request, most_bytes: int) -> int:
    """How long a request's body will be, the most where it does not say.

    Raises:
        HTTPException: it will be too long (413).
    """
    size = content_length(request, otherwise=most_bytes)
    if size > most_bytes:
        raise HTTPException(413, f"longer than {most_bytes:,} bytes")
    return size


def content_length(request: Request, otherwise: int) -> int:
    """The length that a request's header announces; `otherwise` where it announces none."""
    digits = request.headers.get("content-length", "")
    return int(digits) if digits.isdecimal() and len(digits) < 20 else otherwise


async def read_object(request: Request, most_bytes: int = BODY_BYTES) -> dict[str, Any]:
    """The JSON object in a request's body; an empty body is an empty one.

    Raises:
        HTTPException: it is too long (413), too slow (408), or no JSON object (400).
    """
    announced_bytes(request, most_bytes)  # A body that is too long is refused before it is waited for.
    return object_of(await read_body(request, most_bytes))


async def read_body(request: Request, most_bytes: int) -> bytes:
    """A request's body.

    Raises:
        HTTPException: it is too long (413) or too slow (408), or its sender has left (400).
    """

    async def read() -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most_bytes:
                raise HTTPException(413, f"longer than {most_bytes:,} bytes")
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, "too slow") from None
    except ClientDisconnect:
        raise HTTPException(400, "left before the end") from None


def object_of(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        HTTPException: it is none (400).
    Memory: up to 40 times the body, which is how `{"": 0}` over and over is held.
    """
    try:
        content = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(400, "no JSON") from None
    try:
        json.dumps(content, ensure_ascii=False).encode("utf8")
    except UnicodeEncodeError:
        raise HTTPException(400, "half of a surrogate pair, which is in no text") from None
    if not isinstance(content, dict):
        raise HTTPException(400, "no JSON object")
    return content
