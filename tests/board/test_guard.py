"""Who is let in, which files can be reached or sent, and what may be asked: each way that somebody could try."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from board import app as app_module
from board.app import DISK_SPARE, make_app
from board.reader import Outside
from board.service import Board
from settings.declared import places as places_of_settings
from settings.errors import UserError
from support.web.listening import token_of
from tests.board.recorded import beat, folders, start, step, write

HERE = "http://127.0.0.1:8300"
TOKEN = "a-token-of-some-length"


class Page:
    """The application of a test, with its folders."""

    def __init__(self, folder: Path, token: str = "") -> None:
        self.folders = folders(folder)
        self.board = Board(self.folders, folder)
        self.app = make_app(self.board, token, ("box",))

    def client(self, address: str = HERE) -> TestClient:
        return TestClient(self.app, base_url=address, raise_server_exceptions=False, follow_redirects=False)


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path)


@pytest.fixture
def client(page: Page) -> Iterator[TestClient]:
    yield page.client()


def post(client: TestClient, path: str, content: object, **headers: str) -> Any:
    return client.post(path, content=json.dumps(content), headers={"Content-Type": "application/json", **headers})


# --- the name of the host, and other sites ---


def test_only_names_of_this_machine_are_answered(client: TestClient) -> None:
    """DNS rebinding would bring a foreign name that leads here."""
    for host in ("127.0.0.1:8300", "localhost:8300", "[::1]:8300", "box:8300", "LOCALHOST"):
        assert client.get("/", headers={"Host": host}).status_code == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "192.168.0.7", "", "localhost@evil.example", "["):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 421, host


def test_requests_of_other_sites_are_refused(client: TestClient) -> None:
    json_too = {"Content-Type": "application/json"}
    origins = [{"Origin": origin} for origin in ("http://evil.example", "null", "http://127.0.0.1:9999")]
    for header in (*origins, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
        for method in ("GET", "POST"):
            assert client.request(method, "/api/runs", headers={**json_too, **header}).status_code == 403, header
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        form = client.post("/api/start", content=b"{}", headers={"Content-Type": kind})
        assert form.status_code == 415, "what a form could send"
    own = {"Origin": HERE, "Sec-Fetch-Site": "same-origin"}
    assert client.get("/api/runs", headers=own).status_code == 200
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/", headers=link).status_code == 200, "a link from elsewhere opens the page"


def test_every_answer_forbids_foreign_content_and_frames(client: TestClient) -> None:
    for path in ("/", "/static/main.js", "/api/runs", "/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"


# --- the token ---


def test_nothing_is_shown_without_the_token(tmp_path: Path) -> None:
    client = Page(tmp_path, TOKEN).client("http://192.168.0.7:8300")
    for path in ("/", "/api/runs", "/static/main.js", "/api/stream"):
        assert client.get(path).status_code == 401
        for headers in ({"Authorization": "Bearer wrong"}, {"Cookie": "frugalt5_token_8300=wrong"}):
            assert client.get(path, headers=headers).status_code == 401
        assert client.get(f"{path}?token=wrong").status_code == 401


def test_the_token_opens_by_header_and_by_cookie(tmp_path: Path) -> None:
    client = Page(tmp_path, TOKEN).client("http://192.168.0.7:8300")
    assert client.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    moved = client.get(f"/run/one?token={TOKEN}&x=1")
    assert moved.status_code == 303 and moved.headers["location"] == "/run/one?x=1"
    cookie = moved.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert client.get("/api/runs").status_code == 200, "the cookie is sent from now on"
    name, _, value = moved.headers["set-cookie"].partition(";")[0].partition("=")
    assert name == "frugalt5_token_8300" and TOKEN not in value, "other servers of the host get it too"
    other = Page(tmp_path / "other", TOKEN).client("http://192.168.0.7:8301")
    for cookie in (f"{name}={value}", f"frugalt5_token_8301={value}", f"frugalt5_token_8301={TOKEN}"):
        assert other.get("/api/runs", headers={"Cookie": cookie}).status_code == 401


def test_the_token_leads_to_no_other_site(tmp_path: Path) -> None:
    client = Page(tmp_path, TOKEN).client()
    for path in ("//evil.example/", "/\\evil.example/", "/%5Cevil.example/"):
        moved = client.get(f"{path}?token={TOKEN}")
        assert not moved.headers.get("location", "/").startswith(("//", "/\\")), path


def test_others_are_never_let_in_without_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "box.example"):
        for token in (None, "short"):
            with pytest.raises(UserError, match="--token"):
                token_of(token, host)
        assert len(token_of("auto", host)) >= 20 and token_of("auto", host) != token_of("auto", host)
    for host in ("127.0.0.1", "localhost", "::1"):
        assert token_of("auto", host) == "" == token_of(None, host) and token_of(TOKEN, host) == TOKEN


# --- paths ---


PATHS_OUT = (
    *(
        "../secret.jsonl",
        "/etc/passwd",
        "a/../../secret.jsonl",
        "..",
        "a\0b",
        "link.jsonl",
    ),
    *("folder/secret.jsonl", "~/secret", "..\\secret.jsonl", "*.jsonl", "a.jsonl,/etc/passwd", "s3://bucket/a.jsonl"),
)


def test_no_file_outside_is_shown_or_trained_on(page: Page, client: TestClient) -> None:
    where = page.folders
    (where.data_dir.parent / "secret.jsonl").write_text('{"text": "secret"}')
    (where.data_dir / "link.jsonl").symlink_to(where.data_dir.parent / "secret.jsonl")
    (where.data_dir / "folder").symlink_to(where.data_dir.parent)
    (where.data_dir / "a.jsonl").write_text("{}")
    for path in PATHS_OUT:
        for find in (where.data, where.model):
            with pytest.raises(Outside):
                find(path)
        answer = client.get("/api/preview", params={"file": path})
        assert "rows" not in answer.json() and "problems" in answer.json()
        for flag in ("train_file", "finetune_from", "tokenizer_dir", "validation_file") if path else ():
            started = post(client, "/api/start", {"flags": {flag: path, "is_finetune": "True"}})
            assert started.status_code in (404, 422), path
    assert not list(where.log_dir.iterdir())
    assert [file["name"] for file in client.get("/api/data").json()["files"]] == ["a.jsonl"], "no links that lead out"


def test_unknown_runs_are_not_found(client: TestClient) -> None:
    for name in ("%2e%2e%2flogs", "a..%2flogs", "none", "%00", "....//"):
        for part in ("", "/log", "/stream", "/window?first=0&last=1", "/size"):
            assert client.get(f"/api/runs/{name}{part}").status_code == 404


def test_a_log_is_one_of_the_log_folder(page: Page, client: TestClient) -> None:
    secret = page.folders.log_dir.parent / "secret.log"
    secret.write_text("secret")
    write(page.folders, "one", start(), step(1))
    for log in (str(secret), "../secret.log", "/etc/passwd"):
        beat(page.folders, "one", log=log)
        assert "secret" not in client.get("/api/runs/one/log").text
    (page.folders.log_dir / "chat_trainer_low_mem_1.log").write_text("2026 | INFO | run one\nhello\n")
    beat(page.folders, "one", log="logs/chat_trainer_low_mem_1.log")
    assert "hello" in client.get("/api/runs/one/log").text


# --- flags ---


def test_only_the_forms_flags_are_taken(page: Page, client: TestClient) -> None:
    fields = json.dumps(client.get("/api/form").json()["groups"]).split('"')
    own = (*places_of_settings(), "shards_dir", "overwrite", "config", "is_keep_training")
    for flag in (*own, "nonsense", "run-name", "--x", "x=y"):
        answer = post(client, "/api/start", {"flags": {flag: "/tmp/elsewhere"}})
        assert answer.status_code == 422 and flag not in fields, flag
    for name in ("../up", "a/b", ".x", "x" * 300):
        assert post(client, "/api/start", {"flags": {"run_name": name}}).status_code == 404
    assert not list(page.folders.log_dir.iterdir())


def test_values_are_words_and_no_commands(page: Page, client: TestClient) -> None:
    for value in ("$(touch hacked)", "; touch hacked", "x\n--overwrite=True", "--help"):
        name = post(client, "/api/start", {"flags": {"source_prefix": value}}).json()["name"]
        launch = json.loads((page.folders.log_dir / name / "launch.json").read_text())
        assert launch["flags"]["source_prefix"] == value, "one value of one flag, whatever it holds"


def test_only_known_wishes_are_passed_on(page: Page, client: TestClient) -> None:
    write(page.folders, "one", start(), step(1))
    request = page.folders.log_dir / "one" / "request"
    for word in ("kill", "", None, 5, "../stop"):
        assert post(client, "/api/runs/one/wish", {"word": word}).status_code == 404 and not request.exists()
    for word, content in (("save", "save\n"), ("stop", "stop\n"), ("save", "stop\n")):  # A stop stays: it saves too.
        assert post(client, "/api/runs/one/wish", {"word": word}).json() == {"done": word}
        assert request.read_text() == content


# --- text that comes back ---


def test_no_script_builds_markup_from_text() -> None:
    """Everything that is shown goes through text nodes; with the policy of scripts, nothing foreign can run."""
    for path in sorted(app_module.STATIC.glob("*.js")):
        text = path.read_text(encoding="utf8")
        if path.name != "uplot.min.js":
            for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
                assert word not in text, f"{path.name}: {word}"


# --- files that are sent ---


def put(client: TestClient, name: str, content: Any) -> Any:
    return client.put(f"/api/data/{name}", content=content, headers={"Content-Type": "application/octet-stream"})


def test_a_file_is_taken_and_none_is_replaced(page: Page, client: TestClient) -> None:
    assert put(client, "数据.jsonl", b"x" * 5000).json() == {"name": "数据.jsonl", "bytes": 5000}
    assert put(client, "数据.jsonl", b"new").status_code == 422
    (path,) = page.folders.data_dir.iterdir()
    assert path.read_bytes() == b"x" * 5000
    assert [file["name"] for file in client.get("/api/data").json()["files"]] == ["数据.jsonl"]


def test_the_disk_keeps_what_is_kept_free(page: Page, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = iter([DISK_SPARE + 15, DISK_SPARE + 15, DISK_SPARE + 5, 5 * 2**20])  # Others write as well.
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=next(free_bytes)))
    answer = put(client, "a.jsonl", iter([b"x" * 10, b"x" * 10]))
    assert answer.status_code == 422 and "256.0 MiB" in answer.json()["problems"][0]
    assert put(client, "tiny.txt", b"x").status_code == 422
    assert not list(page.folders.data_dir.iterdir())


@pytest.mark.parametrize("name", ["a.py", ".hidden.jsonl", "..%2fa.jsonl", "a%00.jsonl"])
def test_only_data_files_inside_are_taken(page: Page, client: TestClient, name: str) -> None:
    assert put(client, name, b"x").status_code in (404, 405, 422)
    assert not [path for path in page.folders.data_dir.parent.rglob("*a*.jsonl*")]


def test_nothing_is_fetched_from_elsewhere() -> None:
    for path in sorted(app_module.STATIC.iterdir()):
        text = path.read_text(encoding="utf8")
        matches = re.findall(r"""["'`(]\s*(?:https?:)?//\w[^"'`)]*""", text)
        addresses = [address for address in matches if "w3.org" not in address]
        assert not addresses or path.suffix == ".txt", f"{path.name}: {addresses[:2]}"
        assert "@import" not in text and "url(" not in text, path.name


def test_names_and_answers_are_data(page: Page, client: TestClient) -> None:
    evil = "<img src=x onerror=alert(1)>"
    write(page.folders, "one", start(), {"event": "sample", "prompt": evil, "answer": evil})
    answer = client.get("/api/runs/one")
    assert answer.headers["content-type"] == "application/json" and answer.json()["samples"][0]["answer"] == evil
