"""How is what a client sends read? As one JSON object of bounded size, within bounded time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

BODY_BYTES, BODY_SECONDS = 2**20, 60.0


async def read_object(request: Request, most_bytes: int = BODY_BYTES) -> dict[str, Any]:
    """The JSON object in a request's body; an empty body is an empty one.

    Raises:
        HTTPException: it is too long (413), too slow (408), or no JSON object (400).
    """
    try:
        held = await asyncio.wait_for(_read(request, most_bytes), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, "too slow") from None
    try:
        content = json.loads(held or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(400, "no JSON") from None
    try:
        json.dumps(content, ensure_ascii=False).encode("utf8")
    except UnicodeEncodeError:
        raise HTTPException(400, "half of a surrogate pair, which is in no text") from None
    if not isinstance(content, dict):
        raise HTTPException(400, "no JSON object")
    return content


async def _read(request: Request, most_bytes: int) -> bytes:
    held = bytearray()
    async for chunk in request.stream():
        held += chunk
        if len(held) > most_bytes:
            raise HTTPException(413, f"longer than {most_bytes:,} bytes")
    return bytes(held)
