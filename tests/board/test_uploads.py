"""Files that are sent to the page: which are taken, how much of a disk they may fill, and that none replaces
another.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from board.app import DISK_SPARE, make_app
from board.reader import Folders
from board.service import Board
from tests.board.recorded import folders, step, write


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(folders(tmp_path), tmp_path)


@pytest.fixture
def client(board: Board) -> TestClient:
    return TestClient(make_app(board), base_url="http://127.0.0.1:8300", raise_server_exceptions=False)


def put(client: TestClient, name: str, content: Any) -> Any:
    return client.put(f"/api/data/{name}", content=content, headers={"Content-Type": "application/octet-stream"})


def test_a_file_is_taken_and_none_is_replaced(board: Board, client: TestClient) -> None:
    assert put(client, "数据.jsonl", b"x" * 5000).json() == {"name": "数据.jsonl", "bytes": 5000}
    assert put(client, "数据.jsonl", b"new").status_code == 422
    (path,) = board.folders.data_dir.iterdir()
    assert path.read_bytes() == b"x" * 5000
    assert [file["name"] for file in client.get("/api/data").json()["files"]] == ["数据.jsonl"]


def test_what_runs_have_written_is_no_data(board: Board, client: TestClient) -> None:
    """Also where somebody names the folder in which all lie."""
    files = board.folders.data_dir
    own = ("model/config.json", "model/notes.txt", "rows/manifest.json", ".git/a.txt")
    for name in ("own.jsonl", "deep/more.txt", *own):
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text("{}")
    write(board.folders, "one", step(1))
    around = Folders(board.folders.log_dir, board.folders.output_dir, files.parent)
    for where, prefix in ((board.folders, ""), (around, f"{files.name}/")):
        assert sorted(file["name"] for file in where.data_files()) == [f"{prefix}deep/more.txt", f"{prefix}own.jsonl"]


def test_the_disk_keeps_what_is_kept_free(board: Board, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = iter([DISK_SPARE + 15, DISK_SPARE + 15, DISK_SPARE + 5])  # Others write as well.

    def parts() -> Iterator[bytes]:
        yield b"x" * 10
        yield b"x" * 10

    monkeypatch.setattr(Board, "free_disk_bytes", lambda self: next(free_bytes))
    answer = put(client, "a.jsonl", parts())
    assert answer.status_code == 422 and "256.0 MiB" in answer.json()["problems"][0]
    monkeypatch.setattr(Board, "free_disk_bytes", lambda self: 5 * 2**20)
    assert put(client, "tiny.txt", b"x").status_code == 422
    assert not list(board.folders.data_dir.iterdir())


@pytest.mark.parametrize("name", ["a.py", "a", ".hidden.jsonl", "..%2fa.jsonl", "a%2fb.jsonl", "a%00.jsonl", ".jsonl"])
def test_only_data_files_inside_are_taken(board: Board, client: TestClient, name: str) -> None:
    assert put(client, name, b"x").status_code in (404, 405, 422)
    assert not [path for path in board.folders.data_dir.parent.rglob("*a*.jsonl*")]
