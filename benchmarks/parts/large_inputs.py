"""Commands whose memory goes by the size of what is read or sent, not by its rows: their inputs, and clients of a
server.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.parts.rows import write_rows

TEXT_LETTERS = 470_000
ID_LETTERS = 100_000
INPUTS = 2048  # the most of one request
SLOW_CLIENTS = 40
SLOW_SECONDS = 30.0
Flags = dict[str, Any]


def cases(model: Path, folder: Path, sentence: str) -> dict[str, Flags]:
    """Commands with their flags; `client`: what talks to the server meanwhile."""
    words = sentence + " "
    long_text = words * (2 + TEXT_LETTERS // len(words))
    texts, ids, columns = folder / "long_texts.jsonl", folder / "long_id.jsonl", folder / "large_columns.jsonl"
    write_rows(texts, [{"text": long_text[row:][:TEXT_LETTERS]} for row in range(40)])
    write_rows(ids, [{"id": "i" * (ID_LETTERS if row == 30 else 5), "text": f"{row} {sentence}"} for row in range(600)])
    write_rows(columns, [{"prompt": sentence, "page": long_text[row:] + "x" * 130_000} for row in range(40)])
    embed: Flags = {"command": "embed", "model": model, "max_seq_len": 512}
    serve: Flags = {"command": "serve", "model": model, "max_seq_len": 64, "max_new_tokens": 16}
    return {
        "embed, 40 texts of 470 KB": {**embed, "input": texts},
        "embed, 40 texts of 470 KB, a vector a token": {**embed, "input": texts, "vectors": "token"},
        "embed, an id of 100,000 letters": {**embed, "input": ids},
        "generate, columns of 600 KB": {
            "command": "generate",
            "model": model,
            "input": columns,
            "max_seq_len": 128,
            "max_new_tokens": 8,
        },
        "serve, 2,048 texts for vectors": {**serve, "client": ask_for_vectors},
        "serve, 40 clients that do not read": {**serve, "client": leave_answers_unread},
    }


def ask_for_vectors(port: int, pid: int) -> None:
    """One request of as many texts as are allowed, read to its end."""
    request = Request(f"http://127.0.0.1:{port}/v1/embeddings", _body(INPUTS), {"Content-Type": "application/json"})
    _serve_until_done(port, pid, lambda: urlopen(request, timeout=120).read())


def leave_answers_unread(port: int, pid: int) -> None:
    """Many such requests at once, of whose answers nobody reads a byte."""
    _serve_until_done(port, pid, partial(_open_unread, port))


def _open_unread(port: int) -> None:
    body = _body(INPUTS)
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with ExitStack() as opened, selectors.DefaultSelector() as waiting:
        for _ in range(SLOW_CLIENTS):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(request)
            waiting.register(client, selectors.EVENT_READ)
        end = time.monotonic() + SLOW_SECONDS
        while waiting.get_map() and time.monotonic() < end:
            for key, _ in waiting.select(timeout=1):
                waiting.unregister(key.fileobj)  # its answer has begun
        time.sleep(2)  # the answers grow as far as the server lets them


def _body(count: int) -> bytes:
    return json.dumps({"input": [f"text {number}" for number in range(count)]}).encode()


def _serve_until_done(port: int, pid: int, ask: Callable[[], object]) -> None:
    """Ask once the server is up, and end it in any case; it may be gone, as where its budget is refused."""
    with suppress(OSError):  # also of answers that are refused, and connections that are cut
        while not _is_up(port):
            os.kill(pid, 0)
            time.sleep(0.1)
        ask()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _is_up(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
