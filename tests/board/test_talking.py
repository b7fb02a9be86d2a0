"""A model is kept while it is asked, two at a time, and none is ended in an answer. The program is a small stand-in for
`serve`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from board.talking import BUSY, SERVE, Talks
from tests.board.recorded import folders
from tests.training.small_trained import SHAPE, save_trained

STAND_IN = """
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

flags = dict(word[2:].split('=', 1) for word in json.loads(sys.stdin.readline()))
name = os.path.basename(flags['model'])
if name == 'large':
    sys.exit(print('does not fit\\n' + 300 * '.', file=sys.stderr) or 3)

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def send(self, text, code=200):
        self.wfile.write(f'HTTP/1.0 {code} x\\r\\n\\r\\n{text}'.encode())
        self.wfile.flush()

    def do_GET(self):
        path = '/v1/classify' if name == 'labels' else '/v1/chat/completions'
        self.send(json.dumps({'data': [{'endpoints': [path]}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['content-length'])))
        if self.headers['authorization'] != 'Bearer ' + flags['token']:
            return self.send(json.dumps({'error': {'message': 'no key'}}), 401)
        if name == 'labels':
            return self.send(json.dumps({'data': [{'index': 0, 'label': body['input']}]}))
        text = body['messages'][-1]['content']
        if text == 'refused':
            return self.send(json.dumps({'error': {'message': 'too long'}}), 400)
        if text == 'die':
            print('the model broke', file=sys.stderr, flush=True)
            os._exit(1)
        if text == 'killed':
            os.kill(os.getpid(), 9)
        end = None if text == 'long' else 'length' if text == 'cut' else 'stop'
        said = f"{len(body['messages'])} {text}"
        choices = [{'delta': {'role': 'assistant', 'content': ''}, 'finish_reason': None}]
        choices += [{'delta': {'content': said}, 'finish_reason': None}, {'delta': {}, 'finish_reason': end}]
        self.send(''.join('data: ' + json.dumps({'choices': [choice]}) + '\\n\\n' for choice in choices))
        if text == 'long':
            self.rfile.read(1)  # It waits until the page leaves.
        self.send('data: [DONE]\\n\\n')

server = ThreadingHTTPServer((flags['host'], 0), Handler)
print('a line that is no address', flush=True)
print('a note', file=sys.stderr, flush=True)
print(f'serving at http://127.0.0.1:{server.server_port}/v1', flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
os._exit(0)
"""


def talking(folder: Path, go: Callable[[Talks], Awaitable[None]]) -> None:
    """Do something with the models that a page has."""
    where = folders(folder)
    for name in ("one", "two", "three", "labels", "large"):
        (where.output_dir / name).mkdir()

    async def run() -> None:
        talks = Talks(where, folder, (sys.executable, "-c", STAND_IN))
        work = asyncio.create_task(talks.work())
        await asyncio.sleep(0)
        try:
            await go(talks)
            children = processes(talks)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        assert not any(map(psutil.pid_exists, children.values())), "no model outlives the page"

    asyncio.run(run())


def processes(talks: Talks) -> dict[str, int]:
    return {folder.name: server.child.pid for folder, server in talks.servers.items()}


def answer_of(talks: Talks, text: str, model: str = "one", turns: int = 0) -> Any:
    return talks.answer(model, [{"role": "user", "content": text}] * (2 * turns + 1))


async def ask(talks: Talks, text: str, model: str = "one", turns: int = 0) -> list[dict[str, Any]]:
    """What is said to a question, without empty pieces."""
    return [record async for record in answer_of(talks, text, model, turns) if record != {"piece": ""}]


@asynccontextmanager
async def long_answer(talks: Talks, model: str) -> AsyncIterator[None]:
    """Inside, a model is answering."""
    answer = answer_of(talks, "long", model)
    while (await anext(answer)) != {"piece": "1 long"}:
        pass
    try:
        yield
    finally:
        await answer.aclose()


def test_answers_come_from_one_process_as_long_as_it_is_there(tmp_path: Path) -> None:
    async def go(talks: Talks) -> None:
        assert await ask(talks, "hello") == [{"loading": True}, {"piece": "1 hello"}, {"is_cut": False}]
        before = processes(talks)
        assert await ask(talks, "you", turns=2) == [{"piece": "5 you"}, {"is_cut": False}]
        assert await ask(talks, "cut") == [{"piece": "1 cut"}, {"is_cut": True}]
        assert await ask(talks, "refused") == [{"problem": "too long"}]
        assert processes(talks) == before
        assert await ask(talks, "die") == [{"problem": "a note\nthe model broke"}]
        assert (await ask(talks, "again"))[0] == {"loading": True}, "another process takes its place"
        assert await ask(talks, "killed") == [{"problem": "the model's process has ended"}]
        for model in ("two", "three"):
            await ask(talks, "x", model)
        assert set(processes(talks)) == {"two", "three"}, "the one that was used least made room"

    talking(tmp_path, go)


def test_labels_long_conversations_and_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "问" * 20_000}, {"role": "assistant", "content": "答" * 1000}]
    question = {"role": "user", "content": "?"}

    async def go(talks: Talks) -> None:
        assert (await ask(talks, "good", "labels"))[1:] == [{"index": 0, "label": "good"}], "as they are"
        answer = [record async for record in talks.answer("one", [*turns * 50, question])]
        assert {"piece": "5 ?"} in answer, "the oldest turns are not sent"
        assert await ask(talks, "x", "large") == [{"loading": True}, {"problem": "does not fit\n" + 300 * "."}]

    talking(tmp_path, go)


def test_models_that_answer_are_not_ended_for_another_and_outlive_a_reader_that_leaves(tmp_path: Path) -> None:
    async def go(talks: Talks) -> None:
        async with long_answer(talks, "one"):
            before = processes(talks)
            async with long_answer(talks, "two"):
                assert await ask(talks, "short", "three") == [{"problem": BUSY}]
            assert len(await ask(talks, "short", "three")) == 3
            assert set(processes(talks)) == {"one", "three"}
        assert await ask(talks, "short") == [{"piece": "1 short"}, {"is_cut": False}]
        assert processes(talks)["one"] == before["one"]

    talking(tmp_path, go)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_model_ends_with_its_page(tmp_path: Path) -> None:
    """Also where the page is killed: the system closes what the model's process reads."""
    os.mkfifo(tmp_path / "pipe")  # The settings never come.
    with subprocess.Popen(SERVE, cwd=tmp_path, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(json.dumps([f"--config={tmp_path / 'pipe'}"]).encode() + b"\n")
        child.stdin.close()
        assert child.wait(60) == 0


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({}, {"piece", "is_cut"}),
        pytest.param(
            {"head": "sequence", "labels": "few,many"},
            {"index", "label", "probabilities"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"head": "none"}, {"index", "object", "embedding"}, marks=pytest.mark.slow),
    ],
)
def test_each_kind_of_model_answers(tmp_path: Path, shape: dict[str, str], expected: set[str]) -> None:
    where = folders(tmp_path)
    save_trained(where.output_dir / "one", shape=replace(SHAPE, num_decoder_layers=0, **shape) if shape else SHAPE)

    async def go() -> set[str]:
        talks = Talks(where, tmp_path)
        work = asyncio.create_task(talks.work())
        try:
            first, *answer = await ask(talks, "MKVL ab")
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        assert first == {"loading": True}
        return {name for record in answer for name in record}

    assert asyncio.run(go()) == expected
