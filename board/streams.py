"""Server-sent events, by which a page stays current: what has changed, at most once a second, to whoever listens.

A browser reconnects by itself, and is told everything anew: nothing is remembered of it here.
Source: WHATWG HTML, section 9.2, server-sent events.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from board.reader import History
from board.service import READ_BYTES, Board
from common.language import localized

TICK_SECONDS = 1.0
LIST_SECONDS = 2.0
QUIET_TICKS = 15


def json_bytes(content: object, allow_nan: bool = True) -> bytes:
    """Content as JSON, messages in the user's language, whatever is in its texts: half of a surrogate pair, as of names
    that are not UTF-8, as an escape.

    Raises:
        ValueError: it holds numbers that JSON has not, and `allow_nan` is not set.
    """
    text = json.dumps(localized(content), ensure_ascii=False, allow_nan=allow_nan, separators=(",", ":"))
    return text.encode("utf8", "backslashreplace")


def event(name: str, content: object) -> bytes:
    """One event, as it is written to the stream."""
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(content) + b"\n\n"


async def overview_events(board: Board, seconds: float = LIST_SECONDS) -> AsyncIterator[bytes]:
    """The list of runs, whenever it has changed, and now and then where it has not."""
    last = b""
    for tick in itertools.count():
        overview = event("overview", await asyncio.to_thread(board.overview))
        if overview != last or tick % QUIET_TICKS == 0:
            last = overview
            yield overview
        await asyncio.sleep(seconds)


async def run_events(board: Board, name: str, seconds: float = TICK_SECONDS) -> AsyncIterator[bytes]:
    """Facts and charts of one run, whenever they have changed. A long file comes in pieces, each drawn at once."""
    history = board.history(name)
    chart = Chart()
    last = b""
    for tick in itertools.count():
        read = await asyncio.to_thread(history.refresh, READ_BYTES)
        change = await asyncio.to_thread(chart.change, history)
        if change:
            yield event("chart", change)
        if not board.is_known(name):
            yield event("gone", name)
            return
        facts = event("facts", await asyncio.to_thread(board.details, name, history))
        if facts != last or tick % QUIET_TICKS == 0:
            last = facts
            yield facts
        await asyncio.sleep(0.0 if read >= READ_BYTES else seconds)


class Chart:
    """What one listener has drawn already."""

    def __init__(self) -> None:
        self._drawn = (0, 0)  # generation and version of the grid
        self._events = 0
        self._size = 0

    def change(self, history: History) -> dict[str, Any] | None:
        """The buckets that are new or have changed; None if none have."""
        with history.lock:
            grid = history.grid
            drawn = (history.generation, grid.version)
            is_same = drawn == self._drawn
            if is_same and history.drawn_events == self._events:
                return None
            first = max(0, self._size - 1) if is_same else 0
            self._drawn = drawn
            self._events = history.drawn_events
            self._size = grid.size
            return {"generation": history.generation, **grid.drawn(first)}
