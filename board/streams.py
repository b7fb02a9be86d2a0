"""Server-sent events, by which a page stays current: what has changed, at most once a second, to whoever listens.

A browser reconnects by itself, and is told everything anew: nothing is remembered of it here.
Source: WHATWG HTML, section 9.2, server-sent events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from board.history import History
from board.places import json_bytes
from board.service import READ_BYTES, Board

TICK_SECONDS, LIST_SECONDS, QUIET_TICKS = 1.0, 2.0, 15


def event(name: str, content: object) -> bytes:
    """One event, as it is written to the stream."""
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(content) + b"\n\n"


async def overview_events(board: Board, seconds: float = LIST_SECONDS) -> AsyncIterator[bytes]:
    """The list of runs, whenever it has changed."""
    last, quiet = b"", 0
    while True:
        now = event("overview", await asyncio.to_thread(board.overview))
        quiet += 1
        if now != last or quiet >= QUIET_TICKS:
            last, quiet = now, 0
            yield now
        await asyncio.sleep(seconds)


async def run_events(board: Board, name: str, seconds: float = TICK_SECONDS) -> AsyncIterator[bytes]:
    """Facts and charts of one run, whenever they have changed. A long file comes in pieces, each drawn at once."""
    history, chart, last, quiet = board.history(name), Chart(), b"", 0
    while True:
        read = await asyncio.to_thread(history.refresh, READ_BYTES)
        if change := await asyncio.to_thread(chart.change, history):
            yield event("chart", change)
        if not board.is_known(name):
            yield event("gone", name)
            return
        facts = event("facts", await asyncio.to_thread(board.details, name, history))
        if facts != last:
            yield facts
        quiet = 0 if change or facts != last else quiet + 1
        last = facts
        if quiet >= QUIET_TICKS:
            quiet = 0
            yield b": alive\n\n"
        await asyncio.sleep(0.0 if read >= READ_BYTES else seconds)


class Chart:
    """What one listener has drawn already."""

    def __init__(self) -> None:
        self._drawn: tuple[int, int] | None = None
        self._size = self._count = 0

    def change(self, history: History) -> dict[str, Any] | None:
        """The buckets that are new or have changed; None if none have."""
        with history.lock:
            grid, drawn = history.grid, (history.generation, history.grid.version)
            if drawn == self._drawn and history.count == self._count:
                return None
            first = max(0, self._size - 1) if drawn == self._drawn else 0
            self._drawn, self._size, self._count = drawn, grid.size, history.count
            return {"generation": history.generation, **grid.drawn(first)}
