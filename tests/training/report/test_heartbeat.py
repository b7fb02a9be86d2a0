"""A run's sign of life, how it ends, and what may be wished of it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from settings.errors import UserError
from training.processes.interrupts import Interrupts, ends_like_ctrl_c, interrupt_main_thread
from training.report import heartbeat
from training.report.endings import SAVE, STOP, Interrupted
from training.report.heartbeat import HEARTBEAT_FILE, PREPARING_FILE, REQUEST_FILE, Beginning, Heartbeat


def told(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / HEARTBEAT_FILE).read_text("utf8"))
    return record


def test_a_run_is_running_from_the_first_moment(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, lambda: {"step": 3}):
        record = told(tmp_path)
    assert (record["state"], record["step"], record["process"]) == ("running", 3, os.getpid())
    assert told(tmp_path)["state"] == "done"


def test_it_goes_on_beating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []
    monkeypatch.setattr(heartbeat, "SECONDS", 0.001)
    with Heartbeat(tmp_path, lambda: {"step": beats.append(1)}):
        while len(beats) < 4:
            pass
    assert len(beats) >= 4


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (Interrupted("stopped after step 4"), "stopped", "stopped after step 4"),
        (KeyboardInterrupt(), "stopped", ""),
        (UserError("a = 1, is wrong", "b = 2, too"), "failed", "a = 1, is wrong\nb = 2, too"),
        (ValueError("odd"), "failed", "ValueError: odd"),
    ],
)
def test_its_last_beat_says_how_the_run_ended(tmp_path: Path, error: BaseException, state: str, reason: str) -> None:
    with pytest.raises(type(error)), Heartbeat(tmp_path, dict):
        raise error
    assert (told(tmp_path)["state"], told(tmp_path)["reason"]) == (state, reason)


def test_a_wish_is_heard_once(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, dict) as beating:
        assert beating.wish() == ""
        (tmp_path / REQUEST_FILE).write_text("save\n")
        assert beating.wish() == SAVE
        assert beating.wish() == ""


@pytest.mark.parametrize("content", [b"delete", b"\xff\xfe", b"", b"stop" * 99])
def test_other_words_are_no_wish(tmp_path: Path, content: bytes) -> None:
    with Heartbeat(tmp_path, dict) as beating:
        (tmp_path / REQUEST_FILE).write_bytes(content)
        assert beating.wish() == ""


def test_what_was_wished_of_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / REQUEST_FILE).write_text("stop")
    with Beginning(never) as sign:
        sign.begin(tmp_path, dict)
        assert not (tmp_path / REQUEST_FILE).exists()


def never() -> None:
    raise AssertionError("nobody has asked for it")


@pytest.mark.timeout(60)
def test_a_run_that_prepares_is_stopped_as_ctrl_c_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "logs" / "one"
    monkeypatch.setattr(heartbeat, "SECONDS", 0.001)
    with pytest.raises(KeyboardInterrupt), ends_like_ctrl_c(), Beginning(interrupt_main_thread) as sign:
        sign.begin(folder, dict)
        (folder / REQUEST_FILE).write_text("stop\n")
        threading.Event().wait()  # as for a child that prepares
    assert list(tmp_path.iterdir()) == [], "it had come to nothing that is kept"


@contextmanager
def begun_while_asked(folder: Path, wish: str) -> Iterator[None]:
    """A run that has prepared for four beats with a wish before it, and goes on to its first step."""
    beats: list[int] = []
    with Beginning(never) as sign:
        sign.begin(folder, lambda: {"step": beats.append(1)})
        (folder / REQUEST_FILE).write_text(wish)
        while len(beats) < 4:
            pass
        sign.leave()
        yield


@pytest.mark.timeout(60)
def test_while_it_prepares_a_wish_to_save_waits_for_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.001)
    with begun_while_asked(tmp_path, "save"), Heartbeat(tmp_path, dict) as beating:
        assert beating.wish() == SAVE


@pytest.mark.timeout(60)
def test_in_another_thread_a_wish_to_stop_waits_for_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.001)

    def work() -> None:
        with begun_while_asked(tmp_path, "stop"):
            pass

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert Heartbeat(tmp_path, dict).wish() == STOP


def test_where_nothing_waits_for_sigterm_it_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append(number))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt_main_thread()
        with ends_like_ctrl_c():
            interrupt_main_thread()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt_main_thread()
    finally:
        signal.signal(signal.SIGINT, before)
    assert sent == [signal.SIGINT, signal.SIGTERM]


def test_only_the_main_process_writes_and_listens(tmp_path: Path) -> None:
    (tmp_path / REQUEST_FILE).write_text("stop")
    with Heartbeat(tmp_path, dict, is_main=False) as beating:
        assert beating.wish() == ""
    assert [path.name for path in tmp_path.iterdir()] == [REQUEST_FILE]


def test_a_wish_to_stop_is_a_first_signal() -> None:
    with Interrupts(is_main=False) as interrupts:
        assert interrupts.hear(SAVE) == (0, 1)
        assert interrupts.hear("") == (0, 0)
        assert interrupts.hear(STOP) == (1, 0) and interrupts.stop_requested
        assert interrupts.hear("") == (1, 0)


def test_a_run_that_prepares_gives_signs_and_says_how_far_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "one"
    folder.mkdir(parents=True)
    (folder / PREPARING_FILE).write_text('{"rows": 5}')
    with Beginning(never) as sign:
        sign.begin(folder, lambda: {"kind": "pretrain"})
        record = told(folder)
        assert (record["state"], record["kind"], record["doing"], record["process"]) == (
            "starting", "pretrain", {"rows": 5}, os.getpid(),
        )  # fmt: skip
        sign.leave()
    assert told(folder) == record and not (folder / PREPARING_FILE).exists(), "its own heartbeat goes on from there"


def test_of_a_run_that_is_refused_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(UserError), Beginning(never) as sign:
        sign.begin(tmp_path / "logs" / "one", dict)
        assert told(tmp_path / "logs" / "one")["doing"] is None
        raise UserError("seed = x, is wrong")
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_sign_is_there_again(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, dict):
        pass
    before = told(tmp_path)
    with pytest.raises(KeyboardInterrupt), Beginning(never) as sign:
        sign.begin(tmp_path, dict)
        raise KeyboardInterrupt
    assert told(tmp_path) == before and before["state"] == "done"


def test_one_that_has_not_begun_leaves_everything(tmp_path: Path) -> None:
    with Beginning(never) as sign:
        sign.leave()
    assert list(tmp_path.iterdir()) == []
