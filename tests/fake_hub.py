"""A hub on this machine: as much of the Hugging Face hub's HTTP API as fetching, listing and uploading small files
take.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c" * 40
TOKEN = "hf_known"


@dataclass
class FakeHub:
    """Repositories as folders: `folder/models/OWNER/NAME`, `folder/datasets/OWNER/NAME`."""

    folder: Path
    endpoint: str = ""
    page: bytes = b""  # What is answered to everything, as by a mirror that wants a login.

    def repository(self, name: str, kind: str = "models") -> Path:
        path = self.folder / kind / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def facts(self, root: Path, path: Path) -> dict[str, Any]:
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "d" * 40, "size": 0}
        content = path.read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def answer(self, address: str, body: bytes, headers: Any) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        parts = unquote(urlsplit(address).path).strip("/").split("/")
        if self.page:
            return 200, {"Content-Type": "text/html"}, self.page
        if parts[:2] == ["api", "whoami-v2"]:
            known = headers.get("authorization") == f"Bearer {TOKEN}"
            return _json({"name": "me", "type": "user", "orgs": [], "auth": {}}) if known else (401, {}, b"")
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if headers.get("authorization") != f"Bearer {TOKEN}" or not name.startswith("me/"):
                return 403, {}, b""
            self.repository(name)
            return _json({"url": f"{self.endpoint}/{name}", "name": name, "id": name})
        if parts == ["api", "validate-yaml"]:
            return _json({"errors": [], "warnings": []})
        if parts[0] == "api" and len(parts) > 3:
            kind, owner, name, *rest = parts[1:]
            root = self.folder / kind / owner / name
            return self._api(root, f"{owner}/{name}", rest, body) if root.is_dir() else (404, _gone(), b"")
        if parts[0] == "api":
            return 404, {}, b""
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        file = self.folder / kind / "/".join(parts[:2]) / "/".join(parts[4:])  # OWNER NAME resolve main ...
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = file.read_bytes()
        sent = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if asked_range := headers.get("Range"):
            first, _, last = asked_range.removeprefix("bytes=").partition("-")
            piece = content[int(first) : int(last) + 1 if last else None]
            end = int(first) + len(piece) - 1
            return 206, {**sent, "Content-Range": f"bytes {first}-{end}/{len(content)}"}, piece
        return 200, sent, content

    def _api(self, root: Path, name: str, rest: list[str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        files = sorted(path for path in root.rglob("*") if path.is_file())
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": path.relative_to(root).as_posix()} for path in files]
            return _json({"id": name, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []})
        if rest[0] == "tree":
            place = root.joinpath(*rest[2:])
            return (
                _json([self.facts(root, path) for path in sorted(place.rglob("*"))])
                if place.is_dir()
                else (404, _gone(), b"")
            )
        if rest[0] == "paths-info":
            asked = json.loads(body)["paths"]
            return _json([self.facts(root, root / path) for path in asked if (root / path).exists()])
        if rest[0] == "preupload":
            asked = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            return _json({"files": modes})
        assert rest[0] == "commit"
        for line in body.splitlines():
            record = json.loads(line)
            if record["key"] == "file":
                path = root / record["value"]["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(record["value"]["content"]))
        return _json({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.endpoint}/{name}/commit/{COMMIT}"})


def _json(content: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json", "X-Repo-Commit": COMMIT}, json.dumps(content).encode()


def _gone() -> dict[str, str]:
    return {"X-Error-Code": "RepoNotFound"}


@contextmanager
def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The hub that children of this process find, with somebody logged in."""
    hub = FakeHub(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = hub.answer(self.path, body, self.headers)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_HEAD = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
