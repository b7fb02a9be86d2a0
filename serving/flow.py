"""The way from the engine's thread to that of the requests: what answers are told travels over together, once a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from serving.answers import Answer, Told


class Bridge:
    """Carries what is told from the engine's thread to requests, which live in an event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held: list[tuple[Flow, int, Told]] = []

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Requests live in this loop from now on."""
        self._loop = loop

    def teller(self, flow: Flow, index: int) -> Callable[[Told], None]:
        """What an answer calls, in the engine's thread."""
        return lambda told: self._held.append((flow, index, told))

    def hand_over(self) -> None:
        """Bring over what was told since the last time; in the engine's thread."""
        if not self._held or self._loop is None:
            return
        held, self._held = self._held, []

        def deliver() -> None:
            for flow, index, told in held:
                flow.put(index, told)

        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(deliver)


class Flow:
    """The answers of one request, and what they were told.

    Args:
        seconds: until the request is given up.
    """

    def __init__(self, seconds: float) -> None:
        self.answers: list[Answer] = []
        self._told: asyncio.Queue[tuple[int, Told]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time()
        self._deadline = self.began + seconds
        self.first_seconds: float | None = None  # until the first text came

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._loop.time() - self.began

    def put(self, index: int, told: Told) -> None:
        """An answer was told something."""
        if self.first_seconds is None:
            self.first_seconds = self.seconds
        self._told.put_nowait((index, told))

    async def next(self) -> tuple[int, Told]:
        """What is told next: number of the answer, and what.

        Raises:
            asyncio.TimeoutError: the request has taken too long.
        """
        return await asyncio.wait_for(self._told.get(), max(0.0, self._deadline - self._loop.time()))

    def leave(self) -> None:
        """Nobody waits any more: answers that go on are given up."""
        for answer in self.answers:
            answer.is_left = True
