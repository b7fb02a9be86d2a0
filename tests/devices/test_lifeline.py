"""A child ends with its parent, by a signal of Linux or by looking."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from devices import lifeline

ROOT = Path(lifeline.__file__).parent.parent
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


def test_a_parent_that_has_ended_already(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(lifeline.os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(lifeline, "_asked_linux", lambda: True)
    monkeypatch.setattr(lifeline.sys, "platform", "linux")
    lifeline.end_with(os.getppid())
    assert not sent
    lifeline.end_with(os.getpid())
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_watching_ends_when_another_is_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    parents = iter([7, 7, 1])
    monkeypatch.setattr(lifeline, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(lifeline.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(lifeline.os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(lifeline.sys, "platform", "darwin")
    monkeypatch.setattr(lifeline.threading.Thread, "start", lambda thread: thread.run())
    lifeline.end_with(7)
    assert sent == [signal.SIGTERM]


def test_a_linux_without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: object) -> None:
        raise OSError("no C library")

    monkeypatch.setattr(lifeline.ctypes, "CDLL", missing)
    assert not lifeline._asked_linux()


def test_where_no_signal_can_be_asked_for() -> None:
    """The child watches: its grandchild stands for it, and the process between ends at once."""
    watching = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from devices import lifeline
lifeline._asked_linux, lifeline.LOOK_SECONDS = lambda: False, 0.001
lifeline.end_with(int(sys.argv[1]))
signal.pause()
"""
    starting = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {watching!r}, str(os.getpid())])"
    parent = subprocess.Popen([sys.executable, "-c", starting], stderr=subprocess.PIPE)
    assert parent.communicate(timeout=60)[1] == b"", "the pipe ends when nobody holds it"
