"""Files that are sent to the page: which are taken, how much of a disk they may fill, and that none replaces another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from board import app as app_module
from board.app import DISK_SPARE, make_app
from board.places import Places
from board.runs import folder_bytes
from board.service import Board
from tests.board.recorded import places, step, write
from units import GIB, KIB


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(places(tmp_path), tmp_path, upload_limit=10_000)


@pytest.fixture
def client(board: Board) -> TestClient:
    return TestClient(make_app(board), base_url="http://127.0.0.1:8300", raise_server_exceptions=False)


def put(client: TestClient, name: str, content: Any) -> Any:
    return client.put(f"/api/data/{name}", content=content, headers={"Content-Type": "application/octet-stream"})


def test_a_file_is_taken(board: Board, client: TestClient) -> None:
    assert put(client, "数据.jsonl", b"x" * 5000).json() == {"name": "数据.jsonl", "bytes": 5000}
    assert (board.places.data_dir / "数据.jsonl").stat().st_size == 5000
    assert [file["name"] for file in client.get("/api/data").json()["files"]] == ["数据.jsonl"]


def test_what_runs_have_written_is_no_data(board: Board, client: TestClient) -> None:
    """Also where somebody names the folder in which all lie."""
    files = board.places.data_dir
    for name in (
        "own.jsonl",
        "deep/more.txt",
        "model/config.json",
        "model/notes.txt",
        "rows/manifest.json",
        ".git/a.txt",
    ):
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text("{}")
    assert sorted(file["name"] for file in board.places.data_files()) == ["deep/more.txt", "own.jsonl"]
    write(board.places, "one", step(1))
    around = Places(board.places.log_dir, board.places.output_dir, files.parent)
    assert sorted(file["name"] for file in around.data_files()) == [
        f"{files.name}/deep/more.txt",
        f"{files.name}/own.jsonl",
    ]


def test_one_that_is_too_large_leaves_nothing(board: Board, client: TestClient) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    assert put(client, "big.jsonl", parts()).status_code == 422
    assert not list(board.places.data_dir.iterdir())


def test_a_full_disk_is_told(board: Board, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Board, "free_disk_bytes", lambda self: app_module.DISK_SPARE + 10)
    assert put(client, "a.jsonl", b"x" * 11).status_code == 422
    assert not list(board.places.data_dir.iterdir())


def test_no_file_is_replaced(board: Board, client: TestClient) -> None:
    (board.places.data_dir / "a.jsonl").write_text("old")
    assert put(client, "a.jsonl", b"new").status_code == 422
    assert (board.places.data_dir / "a.jsonl").read_text() == "old"


@pytest.mark.parametrize(
    "name", ["a.py", "a", ".hidden.jsonl", "..%2fa.jsonl", "%2e%2e%2fa.jsonl", "a%2fb.jsonl", "a%00.jsonl", ".jsonl"]
)
def test_only_data_files_inside_are_taken(board: Board, client: TestClient, name: str) -> None:
    assert put(client, name, b"x").status_code in (404, 405, 422)
    assert not [path for path in board.places.data_dir.parent.rglob("*a*.jsonl*")]


async def send(board: Board, name: str, chunks: Sequence[bytes], *headers: tuple[bytes, bytes]) -> tuple[int, str, int]:
    """Upload in chunks, as a server gets them. Returns the status, what is answered, and the chunks that were asked for."""
    asked, told = 0, list[Any]()

    async def receive() -> Any:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": chunks[asked - 1], "more_body": asked < len(chunks)}

    async def answer(message: Any) -> None:
        told.append(message)

    scope = {
        "type": "http", "method": "PUT", "path": f"/api/data/{name}", "raw_path": b"", "query_string": b"", "root_path": "",
        "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8300),
        "headers": [(b"host", b"127.0.0.1:8300"), (b"content-type", b"application/octet-stream"), *headers],
    }  # fmt: skip
    await make_app(board)(scope, receive, answer)
    return told[0]["status"], b"".join(part.get("body", b"") for part in told[1:]).decode(), asked


def test_uploads_at_the_same_time_leave_what_is_kept_free(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.upload_limit, room, unasked, chunk = GIB, 256 * KIB, 32 * KIB, b"x" * 16 * KIB
    left: list[int] = []

    def free(self: Board) -> int:
        left.append(room - folder_bytes(self.places.data_dir))
        return DISK_SPARE + left[-1]

    async def go() -> list[tuple[int, str, int]]:
        return await asyncio.gather(*(send(board, f"{number}.txt", [chunk] * 12) for number in range(4)))

    monkeypatch.setattr(Board, "free_disk_bytes", free)
    monkeypatch.setattr(app_module, "UNASKED_BYTES", unasked, raising=False)
    answers = asyncio.run(go())
    assert {status for status, _, _ in answers} <= {200, 422} and sum(status == 200 for status, _, _ in answers) <= 1
    assert min(left) >= -4 * (unasked + len(chunk)), "no more than each writes between two looks"


@pytest.mark.parametrize(("size", "why"), [(10_001, "larger than 10,000 bytes"), (5000, "only 256.0 MiB left")])
def test_what_is_announced_is_refused_before_it_is_read(
    board: Board, monkeypatch: pytest.MonkeyPatch, size: int, why: str
) -> None:
    monkeypatch.setattr(Board, "free_disk_bytes", lambda self: DISK_SPARE + 4999)
    status, told, asked = asyncio.run(send(board, "a.txt", [b"x" * size], (b"content-length", str(size).encode())))
    assert (status, asked) == (422, 0) and why in told


@pytest.mark.parametrize("announced", [(), ((b"content-length", b"1"),)])
def test_a_disk_that_is_below_what_is_kept_free_says_so(
    board: Board, monkeypatch: pytest.MonkeyPatch, announced: Sequence[tuple[bytes, bytes]]
) -> None:
    monkeypatch.setattr(Board, "free_disk_bytes", lambda self: 5 * 2**20)
    status, told, asked = asyncio.run(send(board, "tiny.txt", [b"x"], *announced))
    assert (status, asked) == (422, 0) and "it has only 5.0 MiB left, and 256.0 MiB are kept free" in told
