"""Answers of trained models on the page: a `serve` process for each model, asked over HTTP and kept while it is used.

A model is loaded once and answers as long as somebody asks; after ten quiet minutes, or when other models are wanted,
its process ends and its memory is free. Two may be there at a time, so that two checkpoints can be compared. One that
is answering is never ended for another. The conversation is the browser's: it sends the earlier turns with each
question.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from board.reader import Folders
from settings.program import full_name, python_command
from support import child_process
from support.language import say, spoken

MOST_MODELS = 2
QUIET_SECONDS = 600.0
LOAD_SECONDS = 300.0
SILENT_SECONDS = 300.0
ENDING_SECONDS = 5.0
LONGEST_LINE = 2**22  # The labels of all letters of the longest question are one line.
HISTORY_BYTES = 2**17  # The earlier turns that are sent: half of what `serve` reads of a request.
HOST = "127.0.0.1"
ADDRESS = re.compile(rf"http://{re.escape(HOST)}:(\d+)/v1".encode())
SERVE = tuple(python_command(f"from {full_name('board.talking')} import run_server; run_server()"))
BUSY = say(
    "{most_talks} models are already answering, and no more can be loaded; try again when one has finished",
    most_talks=MOST_MODELS,
)
Turns = list[dict[str, Any]]
Records = AsyncGenerator[dict[str, Any], None]


class NoAnswer(Exception):
    """There is no answer; the text says why, in the words of the model's process where it has ended."""


def run_server() -> None:
    """Run `serve` in this process; its flags are the first line of standard input, where no other user sees the key.

    The process ends with its standard input, which the system closes also where the page is killed.
    """
    words = json.loads(sys.stdin.readline())

    def end_with_input() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_input, daemon=True).start()
    sys.exit(import_module(full_name("train_low_mem")).main(["serve", *words]))


class Server:
    """The process of one model.

    Args:
        key: that opens it.
    """

    def __init__(self, child: asyncio.subprocess.Process, key: str) -> None:
        self.child = child
        self.key = key
        self.port = 0  # It is known once the model is loaded.
        self.requests = 0  # This many are being answered now.
        self.used = time.monotonic()
        self.errors: deque[str] = deque(maxlen=6)  # The last lines.
        self.is_settled = asyncio.Event()  # The model is loaded, or the process has ended.
        self.watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Read what the process prints until it ends."""
        await asyncio.gather(self._read_output(), self._read_errors(), self.child.wait())
        self.is_settled.set()

    async def _read_output(self) -> None:
        assert self.child.stdout is not None
        async for line in self.child.stdout:
            address = ADDRESS.search(line)
            if address is not None:
                self.port = int(address[1])
                self.is_settled.set()

    async def _read_errors(self) -> None:
        assert self.child.stderr is not None
        async for line in self.child.stderr:
            self.errors.append(line.decode("utf8", "replace").rstrip())

    async def death(self) -> NoAnswer:
        """Why a process that has ended, is just ending, or has closed a connection gives no answer."""
        await asyncio.wait([self.watching], timeout=ENDING_SECONDS)
        if self.child.returncode is None:
            return NoAnswer(say("the model's process has closed the connection; ask again"))
        if self.child.returncode < 0 or not self.errors:  # A killed process could not say why.
            return NoAnswer(say("the model's process has ended"))
        return NoAnswer("\n".join(self.errors))

    async def answer(self, messages: Turns, temperature: float) -> Records:
        """What the model says to the newest message, by what it does first: text in pieces, labels, or a vector.

        Raises:
            NoAnswer: the request was refused, or the process has ended. TimeoutError, OSError, EOFError: so it seems.
        """
        question = messages[-1]["content"]
        async with aclosing(self._records("GET", "/v1/models", {})) as models:
            (listed,) = [record async for record in models]
        path = listed["data"][0]["endpoints"][0]
        if path != "/v1/chat/completions":
            async with aclosing(self._records("POST", path, {"input": question})) as answers:
                async for record in answers:
                    yield record["data"][0]
            return
        chat = {"messages": _newest(messages), "temperature": temperature, "stream": True}
        async with aclosing(self._records("POST", path, chat)) as chunks:
            async for record in chunks:
                choice = record["choices"][0]
                yield {"piece": choice["delta"].get("content", "")}
                if choice["finish_reason"]:
                    yield {"is_cut": choice["finish_reason"] == "length"}
                    return
        raise await self.death()

    async def _records(self, method: str, path: str, content: object) -> Records:
        """The JSON objects of an answer, of which a stream of events has several."""
        reader, writer = await asyncio.open_connection(HOST, self.port, limit=LONGEST_LINE)
        try:
            body = json.dumps(content, ensure_ascii=False).encode()
            # In HTTP/1.0 the body of an answer is sent as it is, and ends with the connection.
            head = (
                f"{method} {path} HTTP/1.0\r\nHost: {HOST}:{self.port}\r\nAuthorization: Bearer {self.key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SILENT_SECONDS)
            while line := await asyncio.wait_for(reader.readline(), SILENT_SECONDS):
                text = line.removeprefix(b"data: ").strip()
                if text.startswith(b"{"):
                    record = json.loads(text)
                    if "error" in record:
                        raise NoAnswer(record["error"]["message"])
                    yield record
        finally:
            writer.close()


def _newest(messages: Turns) -> Turns:
    """The newest of a conversation: the question, and as many earlier questions and answers as may be sent with it."""
    first = len(messages) - 1
    size = 0
    while first > 0:
        start = max(0, first - 2)
        size += len(json.dumps(messages[start:first], ensure_ascii=False).encode())
        if size > HISTORY_BYTES:
            break
        first = start
    return messages[first:]


@dataclass
class Talks:
    """The models that answer on the page.

    Args:
        folder: where the program is run.
    """

    folders: Folders
    folder: Path
    program: tuple[str, ...] = SERVE
    servers: dict[Path, Server] = field(default_factory=dict)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, model: str, messages: Turns, temperature: float = 0.0) -> Records:
        """Ask a model, and give its answer as it comes: `loading`, `piece` and `is_cut` of a text, the columns of
        labels, `embedding`, `problem`.

        Args:
            model: folder below the model folder. messages: of a conversation; the last is the question.
        """
        server = None
        try:
            server = await self._server(self.folders.model(model))
            if not server.is_settled.is_set():
                yield {"loading": True}
                await asyncio.wait_for(server.is_settled.wait(), LOAD_SECONDS)
            if server.child.returncode is not None:
                raise await server.death()
            async with aclosing(server.answer(messages, temperature)) as records:
                async for record in records:
                    yield record
        except (asyncio.TimeoutError, TimeoutError):
            yield {"problem": say("no answer within {seconds:.0f} s", seconds=SILENT_SECONDS)}
        except NoAnswer as error:
            yield {"problem": error.args[0]}
        except (OSError, EOFError):  # The connection broke.
            assert server is not None
            death = await server.death()
            yield {"problem": death.args[0]}
        finally:
            if server is not None:
                server.requests -= 1
                server.used = time.monotonic()

    async def _server(self, folder: Path) -> Server:
        """The process of a model, started where it has none; one request more is counted for it.

        Raises:
            NoAnswer: as many as there may be are busy.
        """
        async with self._starting:
            server = self.servers.get(folder)
            if server is None or server.child.returncode is not None:
                self.servers.pop(folder, None)
                await self._make_room()
                server = self.servers[folder] = await self._start(folder)
            server.requests += 1
            return server

    async def _start(self, folder: Path) -> Server:
        # The page's Ctrl-C is for the page, which ends its models.
        child = await child_process.start_async(
            self.program, cwd=self.folder, limit=LONGEST_LINE, start_new_session=True
        )
        server = Server(child, secrets.token_urlsafe(18))
        flags = {"model": folder, "host": HOST, "port": 0, "token": server.key, "language": spoken()}
        assert child.stdin is not None
        with suppress(ConnectionError):  # It has ended already.
            child.stdin.write(json.dumps([f"--{name}={value}" for name, value in flags.items()]).encode() + b"\n")
            await child.stdin.drain()
        return server

    async def _make_room(self) -> None:
        """End those that were used least, until one more may be there."""
        while len(self.servers) >= MOST_MODELS:
            idle = [folder for folder, server in self.servers.items() if not server.requests]
            if not idle:
                raise NoAnswer(BUSY)
            await self._end(min(idle, key=lambda folder: self.servers[folder].used))

    async def _end(self, folder: Path) -> None:
        server = self.servers.pop(folder)
        with suppress(ProcessLookupError):
            server.child.kill()
        await server.child.wait()

    async def work(self) -> None:
        """End the models that are quiet, until cancelled; then all."""
        try:
            while True:
                await asyncio.sleep(QUIET_SECONDS / 20)
                for folder, server in list(self.servers.items()):
                    if not server.requests and time.monotonic() - server.used > QUIET_SECONDS:
                        await self._end(folder)
        finally:
            for folder in list(self.servers):
                await self._end(folder)
