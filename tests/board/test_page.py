"""What the page is told: streams, forms, previews, models; and that its words are whole in both languages."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from board.app import STATIC, make_app
from board.form import FIRST, command_line
from board.places import Places
from board.service import KEPT_HISTORIES, Board
from board.streams import Chart, overview_events, run_events
from config import ROOT, flags_of, load
from config import places as places_of_settings
from tests.board.recorded import beat, places, start, step, write


def told(event: bytes) -> tuple[str, Any]:
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def first(events: AsyncIterator[bytes], count: int) -> list[tuple[str, Any]]:
    found = []
    async for event in events:
        found.append(told(event))
        if len(found) == count:
            break
    return found


def test_a_run_is_streamed_and_then_only_what_is_new(tmp_path: Path) -> None:
    where = places(tmp_path)
    path = write(where, "one", start(), *(step(n) for n in range(1, 20)))
    beat(where, "one", time=time.time())
    board = Board(where, tmp_path)

    async def go() -> None:
        events = run_events(board, "one", seconds=0.0)
        (kind, chart), (other, facts) = await first(events, 2)
        assert (kind, other) == ("chart", "facts") and facts["state"] == "running"
        assert chart["first"] == 0 and chart["steps"] == list(range(20))
        with path.open("a") as file:
            file.write(json.dumps(step(20, 9.0)) + "\n")
        kind, chart = (await first(run_events(board, "one", seconds=0.0), 1))[0]
        assert chart["first"] == 0, "a browser that comes back is told everything"

    asyncio.run(go())


def test_of_many_pages_each_goes_on_knowing_its_run(tmp_path: Path) -> None:
    """More than there are histories kept: each page has its own, which others do not make the page forget."""
    where, names = places(tmp_path), [f"run{number}" for number in range(KEPT_HISTORIES + 3)]
    paths = [write(where, name, start(), step(1), {"event": "sample", "prompt": "a"}) for name in names]
    board = Board(where, tmp_path)

    async def go() -> list[Any]:
        pages = [run_events(board, name, seconds=0.0) for name in names]
        for events in pages:
            await first(events, 2)
        for path in paths:
            with path.open("a") as file:
                file.write(json.dumps(step(2)) + "\n")
        return [(await first(events, 2))[1] for events in pages]

    for kind, facts in asyncio.run(go()):
        assert kind == "facts" and facts["settings"]["max_steps"] == 100 and len(facts["samples"]) == 1
    assert len(board._histories) == KEPT_HISTORIES


def test_what_was_forgotten_is_read_again(tmp_path: Path) -> None:
    where = places(tmp_path)
    write(where, "one", start(), *(step(n) for n in range(1, 20)))
    board = Board(where, tmp_path)
    assert board.details("one")["settings"]["max_steps"] == 100
    board._histories.clear()
    window: Any = board.window("one", 5, 6)
    assert window["steps"] == [5, 6] and window["seconds"][0] > 0, "the clock of the whole run"


def test_histories_are_found_by_many_threads_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("board.service.KEPT_HISTORIES", 1)
    monkeypatch.setattr("board.service.History", Path)  # and nothing beside the look itself takes time
    monkeypatch.setattr(Places, "logs", lambda self, name: self.log_dir)
    board, before = Board(places(tmp_path), tmp_path), sys.getswitchinterval()

    def look(name: str) -> None:
        for _ in range(8000):
            board.history(name)

    sys.setswitchinterval(1e-6)  # threads take turns within a line
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(look, "abcdefgh")) == [None] * 8
    finally:
        sys.setswitchinterval(before)


def test_a_chart_changes_by_its_last_buckets(tmp_path: Path) -> None:
    where = places(tmp_path)
    path = write(where, "one", *(step(n) for n in range(1, 20)))
    history, chart = Board(where, tmp_path).history("one"), Chart()
    history.refresh()
    assert chart.change(history) is not None and chart.change(history) is None
    with path.open("a") as file:
        file.write(json.dumps(step(20, 9.0)) + "\n")
    history.refresh()
    change = chart.change(history)
    assert change is not None and change["first"] == 19 and change["steps"] == [19, 20]
    with path.open("a") as file:
        file.write("".join(json.dumps(step(n)) + "\n" for n in range(21, 600)))
    history.refresh()
    wider = chart.change(history)
    assert wider is not None and wider["first"] == 0 and wider["width"] == 2, "the grid has changed: all anew"


def test_a_run_that_is_deleted_meanwhile_is_told_as_gone(tmp_path: Path) -> None:
    where = places(tmp_path)
    path = write(where, "one", start())
    board = Board(where, tmp_path)

    async def go() -> Any:
        events = run_events(board, "one", seconds=0.0)
        await anext(aiter(events))
        path.unlink()
        return [told(event)[0] async for event in events][-1]

    assert asyncio.run(go()) == "gone"


def test_the_list_is_streamed(tmp_path: Path) -> None:
    where = places(tmp_path)
    write(where, "one", start(), step(1))

    async def go() -> Any:
        return (await first(overview_events(Board(where, tmp_path), seconds=0.0), 1))[0]

    kind, overview = asyncio.run(go())
    assert kind == "overview" and [run["name"] for run in overview["runs"]] == ["one"]
    assert overview["machine"]["total_bytes"] is None or overview["machine"]["total_bytes"] > 0


def client(tmp_path: Path) -> TestClient:
    return TestClient(make_app(Board(places(tmp_path), tmp_path)), base_url="http://127.0.0.1:8300")


def test_every_address_shows_the_page(tmp_path: Path) -> None:
    for path in ("/", "/new", "/plan", "/chat", "/run/one"):
        assert "main.js" in client(tmp_path).get(path).text


def test_the_form_has_every_setting_of_training_once(tmp_path: Path) -> None:
    told = client(tmp_path).get("/api/form").json()
    names = [field["name"] for group in told["groups"] for field in group["fields"]]
    assert len(names) == len(set(names))
    own = {*places_of_settings(), "overwrite", "is_keep_training"}
    assert set(flags_of("train")) - set(names) == own
    assert set(FIRST) - {"model_preset"} <= set(names) and "t5-small" in told["models"]
    assert all(field["help"] and field["allowed"] for group in told["groups"] for field in group["fields"])


def test_the_command_that_is_shown_is_one_that_works() -> None:
    import shlex

    line = command_line("train", {"source_prefix": "it's $HOME; ", "max_steps": "5"})
    words = shlex.split(line)
    assert words[:3] == ["python", "train_low_mem.py", "train"] and "--source_prefix=it's $HOME; " in words
    assert load("train", dict(word[2:].split("=", 1) for word in words[3:])).train.max_steps == 5


def test_problems_are_told_before_anything_is_planned(tmp_path: Path) -> None:
    answer = client(tmp_path).post("/api/plan", json={"flags": {"max_steps": "x", "seed": "-1"}}).json()
    assert len(answer["problems"]) == 2 and answer["exit_code"] == 2


def test_a_data_file_is_previewed(tmp_path: Path) -> None:
    page = client(tmp_path)
    rows = [{"prompt": "what", "response": "that"}, {"prompt": "a longer one", "response": "b"}]
    (tmp_path / "files" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    found = page.get("/api/preview", params={"file": "a.jsonl"}).json()
    assert found["task"] == "pairs" and found["rows"][0] == ["what", "that"] and found["broken"] == 1
    assert found["lengths"]["prompt"] | {"bars": 0} == {"median": 8, "longest": 12, "bars": 0, "bar": 1}


def test_models_are_those_of_runs_and_checkpoints(tmp_path: Path) -> None:
    page = client(tmp_path)
    for folder in ("one", "one/checkpoints/step_00000005", "adapted", "nothing"):
        (tmp_path / "models" / folder).mkdir(parents=True)
    (tmp_path / "models/one/model.safetensors").write_bytes(b"12")
    (tmp_path / "models/one/checkpoints/step_00000005/model.safetensors").write_bytes(b"12")
    (tmp_path / "models/adapted/adapter_model.safetensors").write_bytes(b"1")
    found = {model["name"]: model for model in page.get("/api/models").json()["models"]}
    assert set(found) == {"one", "one/checkpoints/step_00000005", "adapted"}
    assert found["adapted"]["is_adapter"] and found["one/checkpoints/step_00000005"]["is_checkpoint"]


def test_runs_are_compared(tmp_path: Path) -> None:
    page = client(tmp_path)
    for name, loss in (("a", 1.0), ("b", 2.0)):
        write(places(tmp_path), name, step(1, loss))
    found = page.get("/api/compare?name=a&name=b").json()["runs"]
    assert [found[name]["loss"]["mean"][1] for name in "ab"] == [1.0, 2.0]


def keys_of(language: str) -> dict[str, str]:
    text = (STATIC / "texts.js").read_text(encoding="utf8")
    block = text.partition(f"const {language} = {{")[2].partition("\n};")[0]
    return {
        quoted or bare: value for quoted, bare, value in re.findall(r'(?:"([^"]+)"|(\w+)): "((?:[^"\\]|\\.)*)"', block)
    }


def test_both_languages_have_all_words_with_the_same_gaps() -> None:
    english, chinese = keys_of("en"), keys_of("zh")
    assert set(english) == set(chinese) and len(english) > 200
    for key, text in english.items():
        gaps = set(re.findall(r"\{(\w+)\}", text))
        assert gaps == set(re.findall(r"\{(\w+)\}", chinese[key])), key


def test_every_word_that_is_used_exists() -> None:
    known = keys_of("en")
    for path in STATIC.glob("*.js"):
        used = set(re.findall(r'\bt\("([^"]+)"[,)]', path.read_text(encoding="utf8")))
        assert used <= set(known), f"{path.name}: {used - set(known)}"
    used = "\n".join(path.read_text(encoding="utf8") for path in STATIC.glob("*.js") if path.name != "texts.js")
    made = (
        "state_",
        "kind_",
        "phase_",
        "part_",
        "group_",
        "label_",
        "hint_",
        "task_",
        "tab_",
        "theme_",
        "asked_",
        "mode_",
        "machine_",
    )
    unused = [key for key in known if not key.startswith(made) and f'"{key}"' not in used and f"`{key}" not in used]
    unused = [key for key in unused if not key.endswith("_about") or key.removesuffix("_about") not in used]
    assert not unused, unused


def test_chinese_help_is_of_settings_that_exist() -> None:
    text = (STATIC / "settings_zh.js").read_text(encoding="utf8")
    assert set(re.findall(r"\b(\w+): \"", text)) <= set(flags_of("train"))


def test_the_page_never_loads_what_training_needs() -> None:
    """Its memory is that of a small server."""
    code = "import board.app, board.server, board.commands, sys; print([m for m in ('torch', 'numpy', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
