"""Names of files and runs that are no text, or that the page cannot open: they hide nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from board.app import make_app
from board.places import Outside
from board.runs import delete_run, list_runs
from board.service import Board
from board.streams import overview_events, run_events
from tests.board.recorded import beat, places, start, step, write
from training.checkpoints.runs import check_new_run

STRANGE = ["m\udcfe", "a:b", "x" * 200]  # the first one's bytes are not UTF-8


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(places(tmp_path), tmp_path)


@pytest.fixture
def client(board: Board) -> TestClient:
    return TestClient(make_app(board), base_url="http://127.0.0.1:8300", raise_server_exceptions=False)


@pytest.mark.skipif(sys.platform != "linux", reason="names are any bytes")
def test_names_that_are_no_text_hide_nothing_else(board: Board, client: TestClient) -> None:
    for name in ("good", "caf\udce9"):
        (board.places.data_dir / f"{name}.txt").write_text("a")
        (board.places.data_dir / name).mkdir()
        (board.places.data_dir / name / "more.txt").write_text("a")
        (board.places.output_dir / name).mkdir()
        (board.places.output_dir / name / "model.safetensors").write_text("")
    assert {file["name"] for file in client.get("/api/data").json()["files"]} == {"good.txt", "good/more.txt"}
    assert [model["name"] for model in client.get("/api/models").json()["models"]] == ["good"]


@pytest.mark.skipif(sys.platform != "linux", reason="names are any bytes")
def test_runs_that_cannot_be_opened_are_not_listed_and_their_memory_counts(board: Board, client: TestClient) -> None:
    write(board.places, "good", start(), step(1))
    for name in STRANGE:
        beat(board.places, name, time=2e10, anon_bytes=0, peak_bytes=2**30)
    told = client.get("/api/runs").json()
    assert [run["name"] for run in told["runs"]] == ["good"] and told["still_to_take"] == 3 * 2**30
    assert {run["name"] for run in list_runs(board.places)} == {"good", *STRANGE}, "the terminal has them"

    async def first_event() -> bytes:
        return await anext(aiter(overview_events(board)))

    assert json.loads(asyncio.run(first_event()).split(b"data: ")[1])["runs"][0]["name"] == "good"


def test_a_run_whose_files_hold_what_is_no_text_is_shown(board: Board, client: TestClient) -> None:
    half = "\ud83d"
    path = write(
        board.places, "one", start(), {"event": "sample", "prompt": half}, {"event": "recovery", "report": half}
    )
    assert b"\\ud83d" in path.read_bytes()
    beat(board.places, "one", "failed", reason="caf\udce9")
    assert client.get("/api/runs/one").status_code == 200
    assert client.get("/api/runs").json()["runs"][0]["reason"] == "caf\udce9"

    async def first_events() -> list[bytes]:
        events = run_events(board, "one")
        return [await anext(events) for _ in range(2)]

    assert b'"prompt":"\\ud83d"' in asyncio.run(first_events())[1]


@pytest.mark.parametrize("name", ["x" * 121, "训" * 67])
def test_the_page_starts_no_run_of_a_name_that_train_refuses(board: Board, client: TestClient, name: str) -> None:
    answer = client.post("/api/start", json={"flags": {"run_name": name}})
    assert answer.status_code == 404 and "allowed: 120 letters and 200 bytes" in answer.json()["problems"][0]
    assert not any(board.places.log_dir.iterdir()) and check_new_run(board.places.output_dir, name)


@pytest.mark.skipif(sys.platform != "linux", reason="names are any bytes")
@pytest.mark.parametrize("name", ["m\udcfe", "训" * 70, "x" * 130])
def test_in_the_terminal_a_run_of_any_name_can_be_deleted(board: Board, name: str) -> None:
    write(board.places, name, step(1))
    beat(board.places, name, "done")
    (board.places.output_dir / name).mkdir()
    assert delete_run(board.places, name) == ""
    assert not any(board.places.log_dir.iterdir()) and not any(board.places.output_dir.iterdir())


@pytest.mark.parametrize("name", ["", ".", "..", "one/../one", "one/", "/one"])
def test_nothing_but_a_run_is_deleted(board: Board, name: str) -> None:
    write(board.places, "one", step(1), {"event": "end", "step": 1})
    with pytest.raises(Outside):
        delete_run(board.places, name)
    assert (board.places.log_dir / "one").exists()
