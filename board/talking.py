"""Chats with trained models on the page, each through a child process, `chat --json`, kept while it is used.

A model is loaded once and answers as long as somebody asks; after ten quiet minutes, or when other models are wanted,
its process ends and its memory is free. Two may be there at a time, so that two checkpoints can be compared. One that is
answering is never ended for another.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import childproc
from board.places import Places
from board.planning import PROGRAM
from language import say
from settings.errors import reason_of

MOST_TALKS, QUIET_SECONDS, LOAD_SECONDS, INTERRUPT_SECONDS = 2, 600.0, 300.0, 20.0
LONGEST_LINE = 2**20
OPTIONS = ("temperature", "top_p", "max_new_tokens", "num_beams", "history_turns")


BUSY = say(
    "{most_talks} models are already answering, and no more can be loaded; try again when one has finished",
    most_talks=MOST_TALKS,
)


class TalkFailed(Exception):
    """There is no answer; the text says why, in the words of the model's process where it has ended."""


@dataclass
class Talk:
    """One model's process, and the turns that it remembers."""

    pane: str
    child: asyncio.subprocess.Process
    key: tuple[str, ...]
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_ready: bool = False
    ending: asyncio.Task[None] | None = None  # of an answer that nobody waits for

    @property
    def is_busy(self) -> bool:
        """Whether it loads, answers, or ends an answer."""
        return self.lock.locked() or (self.ending is not None and not self.ending.done())

    async def read(self, seconds: float) -> dict[str, Any]:
        """The next line that it says.

        Raises:
            TalkFailed: it has ended.
        """
        assert self.child.stdout is not None and self.child.stderr is not None
        while True:
            line = await asyncio.wait_for(self.child.stdout.readline(), seconds)
            if not line:
                said = (await self.child.stderr.read(4000)).decode("utf8", "replace")
                raise TalkFailed("\n".join(said.strip().splitlines()[-6:]) or say("the model's process has ended"))
            self.used = time.monotonic()
            with suppress(ValueError):
                return dict(json.loads(line))

    async def say(self, record: dict[str, Any]) -> None:
        """Send it a line."""
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(record).encode() + b"\n")
        await self.child.stdin.drain()


@dataclass
class Talks:
    """All talks of the page.

    Args:
        folder: where the program is run.
    """

    places: Places
    folder: Path
    program: tuple[str, ...] = PROGRAM
    _talks: dict[str, Talk] = field(default_factory=dict)
    _seat: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(
        self, pane: str, model: str, text: str, options: dict[str, str], goes_on: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """Ask a model, and give the pieces of its answer as they come.

        Args:
            pane: whose conversation it is. model: folder below the model folder. options: of `OPTIONS`, as flags.
            goes_on: whether earlier turns are to be remembered; where their process has gone, `{"forgotten": true}` says so.
        """
        try:
            talk = await self._talk(pane, model, options)
            if talk.ending is not None:
                await asyncio.wait([talk.ending])
                talk = await self._talk(pane, model, options)
        except TalkFailed as failed:
            yield {"problem": reason_of(failed)}
            return
        async with talk.lock:
            try:
                if not talk.is_ready:
                    if goes_on:
                        yield {"forgotten": True}
                    yield {"loading": True}
                    while not (await talk.read(LOAD_SECONDS)).get("ready"):
                        pass
                    talk.is_ready = True
                await talk.say({"text": text})
                while True:
                    told = await talk.read(LOAD_SECONDS)
                    yield told
                    if told.get("end"):
                        return
            except (TalkFailed, asyncio.TimeoutError, ConnectionError) as error:
                await self._close(talk)
                yield {"problem": reason_of(error) or say("no answer")}
            except (asyncio.CancelledError, GeneratorExit):  # whoever asked has left: the answer is of no use
                talk.ending = asyncio.create_task(self._until_end(talk) if talk.is_ready else self._close(talk))
                raise

    async def _until_end(self, talk: Talk) -> None:
        try:
            talk.child.send_signal(signal.SIGINT)
            while not (await talk.read(INTERRUPT_SECONDS)).get("end"):
                pass
        except (TalkFailed, asyncio.TimeoutError, ProcessLookupError, ValueError):  # the last: Windows sends no SIGINT
            await self._close(talk)

    async def forget(self, pane: str) -> None:
        """Begin a conversation anew."""
        talk = self._talks.get(pane)
        if talk is not None and talk.is_ready and not talk.lock.locked():
            await talk.say({"reset": True})

    async def _talk(self, pane: str, model: str, options: dict[str, str]) -> Talk:
        """The process of a pane, begun where it has none for this model and these options.

        Raises:
            TalkFailed: as many as there may be are busy.
        """
        folder = self.places.model(model)
        words = [f"--{name}={value}" for name, value in sorted(options.items()) if name in OPTIONS]
        key = (str(folder), *words)
        async with self._seat:
            talk = self._talks.get(pane)
            if talk is not None and (talk.key != key or talk.child.returncode is not None):
                await self._close(talk)
                talk = None
            if talk is None:
                await self._make_room()
                argv = [*self.program, "chat", f"--model={folder}", "--json=True", *words]
                child = await childproc.start_async(argv, cwd=self.folder, limit=LONGEST_LINE, start_new_session=True)
                talk = self._talks[pane] = Talk(pane, child, key)
            talk.used = time.monotonic()
            return talk

    async def _make_room(self) -> None:
        """End those that were used least, until there is room for one more."""
        while len(self._talks) >= MOST_TALKS:
            idle = [talk for talk in self._talks.values() if not talk.is_busy]
            if not idle:
                raise TalkFailed(BUSY)
            await self._close(min(idle, key=lambda talk: talk.used))

    async def work(self) -> None:
        """End the talks that are quiet, until cancelled; then all."""
        try:
            while True:
                await asyncio.sleep(QUIET_SECONDS / 20)
                for talk in list(self._talks.values()):
                    if not talk.is_busy and time.monotonic() - talk.used > QUIET_SECONDS:
                        await self._close(talk)
        finally:
            for talk in list(self._talks.values()):
                await self._close(talk)

    async def _close(self, talk: Talk) -> None:
        if self._talks.get(talk.pane) is talk:  # and not one that has taken its place
            del self._talks[talk.pane]
        with suppress(ProcessLookupError):
            talk.child.kill()
        await talk.child.wait()
