"""Server-sent events keep an open page current: at most once a second they send what has changed.

A browser reconnects by itself and then gets everything again: no state is kept for a page that is not connected.
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
from support.language import localized

TICK_SECONDS = 1.0
LIST_SECONDS = 2.0
KEEPALIVE_TICKS = 15  # Even an unchanged event is sent again after this many ticks.


def json_bytes(content: object, allow_nan: bool = True) -> bytes:
    """Content as JSON in UTF-8, with messages in the user's language.

    A lone surrogate, as in a file name that is not UTF-8, is written as an escape.

    Raises:
        ValueError: the content holds inf or nan, and `allow_nan` is False.
    """
    text = json.dumps(localized(content), ensure_ascii=False, allow_nan=allow_nan, separators=(",", ":"))
    return text.encode("utf8", "backslashreplace")


def event(name: str, content: object) -> bytes:
    """The bytes of one event of the stream."""
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(content) + b"\n\n"


async def overview_events(board: Board, seconds: float = LIST_SECONDS) -> AsyncIterator[bytes]:
    """The list of runs: whenever it has changed, and every `KEEPALIVE_TICKS` in any case."""
    last = b""
    for tick in itertools.count():
        overview = event("overview", await asyncio.to_thread(board.overview))
        if overview != last or tick % KEEPALIVE_TICKS == 0:
            last = overview
            yield overview
        await asyncio.sleep(seconds)


async def run_events(board: Board, name: str, seconds: float = TICK_SECONDS) -> AsyncIterator[bytes]:
    """Facts and chart of one run, whenever they have changed. A long file is sent in pieces without a pause between."""
    history = board.history(name)
    chart = Chart()
    last = b""
    for tick in itertools.count():
        bytes_read = await asyncio.to_thread(history.refresh, READ_BYTES)
        change = await asyncio.to_thread(chart.change, history)
        if change:
            yield event("chart", change)
        if not board.is_known(name):
            yield event("gone", name)
            return
        facts = event("facts", await asyncio.to_thread(board.details, name, history))
        if facts != last or tick % KEEPALIVE_TICKS == 0:
            last = facts
            yield facts
        await asyncio.sleep(0.0 if bytes_read >= READ_BYTES else seconds)


class Chart:
    """How much of a run's chart one listener has received."""

    def __init__(self) -> None:
        self._version = (0, 0)  # generation of the history, version of its grid
        self._num_events = 0
        self._num_buckets = 0

    def change(self, history: History) -> dict[str, Any] | None:
        """The buckets that are new or have changed since the last call; None if none have."""
        with history.lock:
            grid = history.grid
            version = (history.generation, grid.version)
            is_same = version == self._version
            if is_same and history.drawn_events == self._num_events:
                return None
            # The last bucket that was sent may have been incomplete, so it is sent again.
            first = max(0, self._num_buckets - 1) if is_same else 0
            self._version = version
            self._num_events = history.drawn_events
            self._num_buckets = grid.size
            return {"generation": history.generation, **grid.drawn(first)}
