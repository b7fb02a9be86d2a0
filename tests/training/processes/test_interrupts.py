"""The first signal asks, the second insists; signals sent twice by a launcher are one request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent
CHILD = """
import os, signal
from training.processes.interrupts import Interrupts
with Interrupts(repeat_seconds={seconds}) as interrupts:
    for number in (signal.{first}, signal.SIGINT):
        os.kill(os.getpid(), number)
    print("saved" if interrupts.stop_requested else "not asked", flush=True)
"""


def run_child(seconds: float, first: str) -> subprocess.CompletedProcess[str]:
    code = CHILD.format(seconds=seconds, first=first)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends the process on Windows")
def test_the_second_leaves_at_once() -> None:
    result = run_child(0.0, "SIGTERM")
    assert result.returncode == 130
    assert "saved" not in result.stdout
    assert "again to quit at once" in result.stderr and "quit without saving" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends the process on Windows")
def test_what_a_launcher_forwards_is_the_same_request() -> None:
    result = run_child(60.0, "SIGINT")
    assert (result.returncode, result.stdout) == (0, "saved\n")
    assert result.stderr.count("again to quit at once") == 1


CLOSED = """
import os, signal, sys
from training.processes.interrupts import Interrupts, ends_like_ctrl_c
signal.signal(signal.SIGHUP, signal.{before})
try:
    with ends_like_ctrl_c(), {context}:
        os.kill(os.getpid(), signal.SIGHUP)
        open(sys.argv[1], "a").write("goes on ")
        os.write(1, b"to nobody")
except KeyboardInterrupt:
    open(sys.argv[1], "a").write("interrupted")
"""


@pytest.mark.skipif(os.name == "nt", reason="no terminals")
@pytest.mark.parametrize(
    ("before", "context", "result", "written"),
    [
        ("SIG_DFL", "Interrupts(is_main=False)", "goes on ", False),
        ("SIG_IGN", "Interrupts(is_main=False)", "goes on ", True),
    ],
    ids=["training", "nohup"],
)
def test_a_terminal_that_is_closed(tmp_path: Path, before: str, context: str, result: str, written: bool) -> None:
    """It asks as Ctrl-C does, and nothing is written to it any more; with nohup it asks for nothing."""
    terminal, inside = os.openpty()
    code = CLOSED.format(before=before, context=context)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "told")], cwd=ROOT, stdout=inside, stderr=inside
    )
    os.close(inside)
    assert child.wait(60) == 0
    assert (tmp_path / "told").read_text() == result
    try:
        assert (b"to nobody" in os.read(terminal, 1000)) is written
    except OSError:  # nothing was written, and nobody is there to write
        assert not written
    os.close(terminal)
