"""A model is kept while it is asked, two at a time, and none is ended in an answer. The program is a small stand-in."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from board.talking import BUSY, Talks
from tests.board.recorded import places

TALKER = """
import json, sys
print('a warning that is no JSON', flush=True)
print(json.dumps({'ready': True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if 'text' in asked:
        if asked['text'] == 'die':
            sys.exit(print('the model broke', file=sys.stderr) or 1)
        for piece in (asked['text'], '!'):
            print(json.dumps({'piece': piece}), flush=True)
        print(json.dumps({'end': True}), flush=True)
"""


def test_a_talk_streams_answers_from_one_process(tmp_path: Path) -> None:
    where = places(tmp_path)
    (where.output_dir / "one").mkdir()
    talks = Talks(where, tmp_path, (sys.executable, "-c", TALKER))

    async def go() -> None:
        told = [piece async for piece in talks.answer("p", "one", "hello", {})]
        assert told == [{"loading": True}, {"piece": "hello"}, {"piece": "!"}, {"end": True}]
        process = talks._talks["p"].child.pid
        await talks.forget("p")
        again = [piece async for piece in talks.answer("p", "one", "you", {})]
        assert again[0] == {"piece": "you"} and talks._talks["p"].child.pid == process
        broken = [piece async for piece in talks.answer("p", "one", "die", {})]
        assert broken == [{"problem": "the model broke"}] and not talks._talks
        for pane in ("a", "b", "c"):
            [piece async for piece in talks.answer(pane, "one", "x", {})]
        assert set(talks._talks) == {"b", "c"}, "the one that was used least made room"
        work = asyncio.create_task(talks.work())
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert not talks._talks, "no model outlives the page"

    asyncio.run(go())


ENDLESS = """
import json, sys
print(json.dumps({'ready': True}), flush=True)
for line in sys.stdin:
    try:
        print(json.dumps({'piece': json.loads(line)['text']}), flush=True)
        while 'long' in line:
            pass
    except KeyboardInterrupt:
        pass
    print(json.dumps({'end': True}), flush=True)
"""


def test_an_answer_that_nobody_waits_for_is_ended_and_the_model_stays(tmp_path: Path) -> None:
    where = places(tmp_path)
    (where.output_dir / "one").mkdir()
    talks = Talks(where, tmp_path, (sys.executable, "-c", ENDLESS))

    async def go() -> None:
        leaving = talks.answer("p", "one", "long", {})
        async for told in leaving:
            if "piece" in told:
                break
        process = talks._talks["p"].child.pid
        await leaving.aclose()  # type: ignore[attr-defined]
        again = [told async for told in talks.answer("p", "one", "short", {})]
        assert again == [{"piece": "short"}, {"end": True}] and talks._talks["p"].child.pid == process
        await talks._close(talks._talks["p"])

    asyncio.run(go())


def test_models_that_answer_are_not_ended_for_another(tmp_path: Path) -> None:
    where = places(tmp_path)
    (where.output_dir / "one").mkdir()
    talks = Talks(where, tmp_path, (sys.executable, "-c", ENDLESS))

    async def go() -> None:
        panes = {pane: talks.answer(pane, "one", "long", {}) for pane in "ab"}
        for told in panes.values():
            assert [await anext(told), await anext(told)] == [{"loading": True}, {"piece": "long"}]
        assert [told async for told in talks.answer("c", "one", "short", {})] == [{"problem": BUSY}]
        talks._talks["a"].child.send_signal(signal.SIGINT)
        assert [told async for told in panes["a"]] == [{"end": True}], "its answer comes to its own end"
        third = [told async for told in talks.answer("c", "one", "short", {})]
        assert third[1:] == [{"piece": "short"}, {"end": True}] and set(talks._talks) == {"b", "c"}
        await panes["b"].aclose()  # type: ignore[attr-defined]
        for talk in list(talks._talks.values()):
            await talks._close(talk)

    asyncio.run(go())


def test_a_talk_that_is_begun_anew_says_that_its_turns_are_forgotten(tmp_path: Path) -> None:
    where = places(tmp_path)
    (where.output_dir / "one").mkdir()
    talks = Talks(where, tmp_path, (sys.executable, "-c", TALKER))

    async def go() -> None:
        async def first(pane: str, goes_on: bool) -> dict[str, Any]:
            records = [told async for told in talks.answer(pane, "one", "x", {}, goes_on)]
            return records[0]

        told = [await first(pane, goes_on) for pane, goes_on in (("a", False), ("a", True), ("b", False), ("c", False))]
        assert told == [{"loading": True}, {"piece": "x"}, {"loading": True}, {"loading": True}]
        assert await first("a", True) == {"forgotten": True}, "others had taken its place"
        for talk in list(talks._talks.values()):
            await talks._close(talk)

    asyncio.run(go())


def test_an_answer_that_is_ended_takes_no_other_model_with_it(tmp_path: Path) -> None:
    where = places(tmp_path)
    for name in ("one", "two"):
        (where.output_dir / name).mkdir()
    talks = Talks(where, tmp_path, (sys.executable, "-c", ENDLESS))

    async def go() -> None:
        leaving = talks.answer("p", "one", "long", {})
        assert [await anext(leaving), await anext(leaving)] == [{"loading": True}, {"piece": "long"}]
        left = talks._talks["p"]
        await leaving.aclose()  # type: ignore[attr-defined]
        told = [told async for told in talks.answer("p", "two", "short", {})]
        assert told[1:] == [{"piece": "short"}, {"end": True}] and left.ending is not None
        await left.ending
        assert talks._talks["p"] is not left and talks._talks["p"].child.returncode is None
        await talks._close(talks._talks["p"])

    asyncio.run(go())


def test_only_known_options_reach_the_model(tmp_path: Path) -> None:
    where = places(tmp_path)
    (where.output_dir / "one").mkdir()
    program = "import json, sys; print(json.dumps({'ready': True, 'words': sys.argv}))"
    talks = Talks(where, tmp_path, (sys.executable, "-c", program))

    async def go() -> Any:
        talk = await talks._talk("p", "one", {"temperature": "0.5", "output_dir": "/tmp"})
        told = await talk.read(60.0)
        await talks._close(talks._talks["p"])
        return told

    words = asyncio.run(go())["words"]
    assert "--temperature=0.5" in words and not [word for word in words if "output_dir" in word]
