"""A model is kept while it is asked, two at a time, and none is ended in an answer. The program is a small stand-in."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from board.talking import BUSY, Talks
from tests.board.recorded import places

TALKER = """
import json, sys, threading
print('a warning that is no JSON', flush=True)
print(json.dumps({'ready': True, 'words': sys.argv}), flush=True)
for line in sys.stdin:
    text = json.loads(line).get('text')
    try:
        if text == 'die':
            sys.exit(print('the model broke', file=sys.stderr) or 1)
        if text:
            print(json.dumps({'piece': text}), flush=True)
        if text == 'long':
            threading.Event().wait()
    except KeyboardInterrupt:
        pass
    if text:
        print(json.dumps({'end': True}), flush=True)
"""


@asynccontextmanager
async def talking(folder: Path) -> AsyncIterator[Talks]:
    """Talks with the models one and two, all ended at the end."""
    where = places(folder)
    for name in ("one", "two"):
        (where.output_dir / name).mkdir()
    talks = Talks(where, folder, (sys.executable, "-c", TALKER))
    work = asyncio.create_task(talks.work())
    try:
        yield talks
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert not talks._talks, "no model outlives the page"


async def ask(talks: Talks, pane: str, text: str, model: str = "one", goes_on: bool = False) -> list[dict[str, Any]]:
    return [told async for told in talks.answer(pane, model, text, {}, goes_on)]


def test_answers_come_from_one_process_as_long_as_it_is_there(tmp_path: Path) -> None:
    async def go() -> None:
        async with talking(tmp_path) as talks:
            assert await ask(talks, "p", "hello") == [{"loading": True}, {"piece": "hello"}, {"end": True}]
            process = talks._talks["p"].child.pid
            await talks.forget("p")
            assert await ask(talks, "p", "you") == [{"piece": "you"}, {"end": True}]
            assert talks._talks["p"].child.pid == process
            assert await ask(talks, "p", "die") == [{"problem": "the model broke"}] and not talks._talks
            for pane in ("a", "b", "c"):
                await ask(talks, pane, "x")
            assert set(talks._talks) == {"b", "c"}, "the one that was used least made room"
            assert (await ask(talks, "a", "x", goes_on=True))[0] == {"forgotten": True}
            assert (await ask(talks, "a", "x", goes_on=True))[0] == {"piece": "x"}

    asyncio.run(go())


def test_an_answer_that_nobody_waits_for_is_ended_and_the_model_stays(tmp_path: Path) -> None:
    async def go() -> None:
        async with talking(tmp_path) as talks:
            leaving = talks.answer("p", "one", "long", {})
            assert [await anext(leaving), await anext(leaving)] == [{"loading": True}, {"piece": "long"}]
            left = talks._talks["p"]
            await leaving.aclose()  # type: ignore[attr-defined]
            assert await ask(talks, "p", "short") == [{"piece": "short"}, {"end": True}]
            assert talks._talks["p"] is left
            leaving = talks.answer("p", "one", "long", {})
            await anext(leaving)
            await leaving.aclose()  # type: ignore[attr-defined]
            assert (await ask(talks, "p", "short", "two"))[1:] == [{"piece": "short"}, {"end": True}]
            assert left.ending is not None
            await left.ending  # takes no other model with it
            assert talks._talks["p"] is not left and talks._talks["p"].child.returncode is None

    asyncio.run(go())


def test_models_that_answer_are_not_ended_for_another(tmp_path: Path) -> None:
    async def go() -> None:
        async with talking(tmp_path) as talks:
            panes = {pane: talks.answer(pane, "one", "long", {}) for pane in "ab"}
            for told in panes.values():
                assert [await anext(told), await anext(told)] == [{"loading": True}, {"piece": "long"}]
            assert await ask(talks, "c", "short") == [{"problem": BUSY}]
            talks._talks["a"].child.send_signal(signal.SIGINT)
            assert [told async for told in panes["a"]] == [{"end": True}], "its answer comes to its own end"
            assert (await ask(talks, "c", "short"))[1:] == [{"piece": "short"}, {"end": True}]
            assert set(talks._talks) == {"b", "c"}
            await panes["b"].aclose()  # type: ignore[attr-defined]

    asyncio.run(go())


def test_only_known_options_reach_the_model(tmp_path: Path) -> None:
    async def go() -> Any:
        async with talking(tmp_path) as talks:
            talk = await talks._talk("p", "one", {"temperature": "0.5", "output_dir": "/tmp"})
            return await talk.read(60.0)

    words = asyncio.run(go())["words"]
    assert "--temperature=0.5" in words and not [word for word in words if "output_dir" in word]
