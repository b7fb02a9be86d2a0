"""What the page is told: streams, forms, previews, models; and that its words are whole in both languages."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from board.app import STATIC, make_app
from board.form import FIRST, command_line
from board.service import KEPT_HISTORIES, Board
from board.streams import run_events
from settings.declared import flags_of
from settings.declared import places as places_of_settings
from settings.loading import load
from tests.board.recorded import beat, folders, start, step, write


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(folders(tmp_path), tmp_path)


@pytest.fixture
def client(board: Board) -> TestClient:
    return TestClient(make_app(board), base_url="http://127.0.0.1:8300", raise_server_exceptions=False)


async def first(events: AsyncIterator[bytes], count: int) -> list[tuple[str, Any]]:
    """So many events of a stream: name and content."""
    parsed = []
    async for event in events:
        name, data = event.decode().removesuffix("\n\n").split("\n")
        parsed.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        if len(parsed) == count:
            break
    return parsed


def append(path: Path, *events: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))


def test_of_many_pages_each_is_told_all_of_its_run_and_then_what_is_new(board: Board) -> None:
    """More than there are histories kept: each page has its own, which others do not make the page forget."""
    names = [f"run{number}" for number in range(KEPT_HISTORIES + 3)]
    paths = [
        write(board.folders, name, start(), *(step(n) for n in range(1, 20)), {"event": "sample", "prompt": "a"})
        for name in names
    ]
    beat(board.folders, "run0", time=time.time())

    async def go() -> list[Any]:
        pages = [run_events(board, name, seconds=0.0) for name in names]
        streams = [await first(events, 2) for events in pages]
        (kind, chart), (other, facts) = streams[0]
        assert (kind, other) == ("chart", "facts") and facts["state"] == "running"
        assert chart["first"] == 0 and chart["steps"] == list(range(20))
        for path in paths:
            append(path, step(20))
        return [await first(events, 2) for events in pages]

    for (_, chart), (_, facts) in asyncio.run(go()):
        assert chart["first"] == 19 and facts["settings"]["max_steps"] == 100 and len(facts["samples"]) == 1
    assert board.history.cache_info().currsize == KEPT_HISTORIES  # type: ignore[attr-defined]
    window: Any = board.window("run0", 5, 6)  # Its history was forgotten, and is read again.
    assert window["steps"] == [5, 6] and window["seconds"][0] > 0, "the clock of the whole run"


def test_every_address_shows_the_page_and_a_program_gets_an_answer(client: TestClient) -> None:
    for path in ("/", "/new", "/plan", "/chat", "/run/one"):
        assert "main.js" in client.get(path).text
    opened = client.get("/nowhere", headers={"Accept": "text/html,*/*"})
    assert opened.status_code == 404 and "main.js" in opened.text
    for path in ("/nowhere", "/api/nowhere"):
        assert client.get(path, headers={"Accept": "application/json"}).json()["problems"]


def test_the_form_has_every_setting_of_training_once(client: TestClient) -> None:
    form = client.get("/api/form").json()
    names = [field["name"] for group in form["groups"] for field in group["fields"]]
    assert len(names) == len(set(names))
    own = {*places_of_settings(), "overwrite", "is_keep_training"}
    assert set(flags_of("train")) - set(names) == own
    assert set(FIRST) - {"model_preset"} <= set(names) and "t5-small" in form["models"]
    assert all(field["help"] and field["allowed"] for group in form["groups"] for field in group["fields"])


def test_the_command_that_is_shown_is_one_that_works() -> None:
    words = shlex.split(command_line("train", {"source_prefix": "it's $HOME; ", "max_steps": "5"}))
    assert words[:3] == ["python", "train_low_mem.py", "train"] and "--source_prefix=it's $HOME; " in words
    assert load("train", dict(word[2:].split("=", 1) for word in words[3:])).train.max_steps == 5


@pytest.mark.parametrize(("language", "word"), [("en", "whole number"), ("zh", "整数")])
def test_problems_come_before_a_plan_in_the_language_of_the_browser(
    client: TestClient, language: str, word: str
) -> None:
    flags = {"max_steps": "x", "seed": "-1"}
    answer = client.post("/api/plan", json={"flags": flags}, headers={"Accept-Language": language}).json()
    assert len(answer["problems"]) == 2 and answer["exit_code"] == 2 and word in answer["problems"][0]


def test_a_data_file_is_previewed(client: TestClient, tmp_path: Path) -> None:
    rows = [{"prompt": "what", "response": "that"}, {"prompt": "a longer one", "response": "b"}]
    (tmp_path / "files" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    preview = client.get("/api/preview", params={"file": "a.jsonl"}).json()
    assert preview["task"] == "pairs" and preview["rows"][0] == ["what", "that"] and preview["broken"] == 1
    assert preview["lengths"]["prompt"] | {"bars": 0} == {"median": 8, "longest": 12, "bars": 0, "bar": 1}


def test_models_are_those_of_runs_and_checkpoints(client: TestClient, tmp_path: Path) -> None:
    for file in (
        "one/model.safetensors",
        "one/checkpoints/step_00000005/model.safetensors",
        "adapted/adapter_model.safetensors",
        "nothing/x",
        "caf\udce9/model.safetensors",
    ):
        if sys.platform == "linux" or "caf" not in file:
            (tmp_path / "models" / file).parent.mkdir(parents=True)
            (tmp_path / "models" / file).write_bytes(b"12")
    models = {model["name"]: model for model in client.get("/api/models").json()["models"]}
    assert set(models) == {"one", "one/checkpoints/step_00000005", "adapted"}
    assert models["adapted"]["is_adapter"] and models["one/checkpoints/step_00000005"]["is_checkpoint"]


def test_runs_are_compared(board: Board, client: TestClient) -> None:
    for name, loss in (("a", 1.0), ("b", 2.0)):
        write(board.folders, name, start(max_steps=int(loss)), step(1, loss))
    content = client.get("/api/compare?name=a&name=b").json()
    assert [content["runs"][name]["series"]["loss"]["mean"][1] for name in "ab"] == [1.0, 2.0]
    assert content["differ"] == {"max_steps": [1, 2]}


def keys_of(language: str) -> dict[str, str]:
    text = (STATIC / "texts.js").read_text(encoding="utf8")
    block = text.partition(f"const {language} = {{")[2].partition("\n};")[0]
    return {
        quoted or bare: value
        for quoted, bare, value in re.findall(r'(?:"([^"]+)"|(\w+)):\s+"((?:[^"\\]|\\.)*)"', block)
    }


def test_both_languages_have_all_words_that_are_used_with_the_same_gaps() -> None:
    english = keys_of("en")
    chinese = keys_of("zh")
    assert set(english) == set(chinese) and len(english) > 200
    for key, text in english.items():
        assert set(re.findall(r"\{(\w+)\}", text)) == set(re.findall(r"\{(\w+)\}", chinese[key])), key
    for path in STATIC.glob("*.js"):
        keys = set(re.findall(r'\bt\("([^"]+)"[,)]', path.read_text(encoding="utf8")))
        assert keys <= set(english), f"{path.name}: {keys - set(english)}"
