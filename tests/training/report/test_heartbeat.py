"""A run's sign of life, how it ends, and what may be requested of it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from settings.errors import UserError
from training.processes.interrupts import ends_like_ctrl_c, interrupt_main_thread
from training.report import heartbeat
from training.report.endings import SAVE, Interrupted
from training.report.heartbeat import PREPARING_FILE, Heartbeat
from training.report.run_files import HEARTBEAT_FILE, REQUEST_FILE

pytestmark = pytest.mark.timeout(60)


def sign_in(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / HEARTBEAT_FILE).read_text("utf8"))
    return record


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.001)


def never() -> None:
    raise AssertionError("nobody has asked for it")


def test_a_run_beats_while_it_prepares_and_until_it_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "one"
    beats: list[int] = []
    folder.mkdir(parents=True)
    (folder / PREPARING_FILE).write_text('{"rows": 5}')
    with Heartbeat() as sign:
        sign.begin(folder, lambda: {"kind": "pretrain"})
        record = sign_in(folder)
        assert (record["state"], record["kind"], record["doing"]) == ("starting", "pretrain", {"rows": 5})
        sign.run(folder, lambda: {"step": beats.append(1) or 3})  # type: ignore[func-returns-value]
        record = sign_in(folder)
        while len(beats) < 4:
            pass
    assert (record["state"], record["step"], record["process"]) == ("running", 3, os.getpid())
    assert sign_in(folder)["state"] == "done" and not (folder / PREPARING_FILE).exists()


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (Interrupted("stopped after step 4"), "stopped", "stopped after step 4"),
        (UserError("a = 1, is wrong", "b = 2, too"), "failed", "a = 1, is wrong\nb = 2, too"),
    ],
)
def test_its_last_beat_says_how_the_run_ended(tmp_path: Path, error: BaseException, state: str, reason: str) -> None:
    with pytest.raises(type(error)), Heartbeat(never) as sign:
        sign.begin(tmp_path, dict)
        sign.run(tmp_path, dict)
        raise error
    assert (sign_in(tmp_path)["state"], sign_in(tmp_path)["reason"]) == (state, reason)


def test_a_request_is_heard_once_by_the_main_process(tmp_path: Path) -> None:
    (tmp_path / REQUEST_FILE).write_text("save\n")
    with Heartbeat() as other:
        assert other.poll_request() == "" and [path.name for path in tmp_path.iterdir()] == [REQUEST_FILE]
    with Heartbeat() as sign:
        sign.run(tmp_path, dict)
        assert [sign.poll_request(), sign.poll_request()] == [SAVE, ""]
        for content in (b"delete", b"\xff\xfe", b"", b"stop" * 99):
            (tmp_path / REQUEST_FILE).write_bytes(content)
            assert sign.poll_request() == "" and not (tmp_path / REQUEST_FILE).exists()


def test_a_run_that_prepares_is_stopped_as_ctrl_c_does(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "one"
    with pytest.raises(KeyboardInterrupt), ends_like_ctrl_c(), Heartbeat(interrupt_main_thread) as sign:
        sign.begin(folder, dict)
        (folder / REQUEST_FILE).write_text("stop\n")
        threading.Event().wait()  # The main thread waits for a child that prepares.
    assert list(tmp_path.iterdir()) == [], "it had come to nothing that is kept"
