"""The display: plain lines for files, a live line for terminals, nothing from other processes."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from support.language import speak
from support.terminal import width
from training.report.progress import Progress


def reading(step: int, **changes: Any) -> dict[str, Any]:
    facts = dict(step=step, loss=2.5, learning_rate=1e-3, tokens_per_second=1234.5)
    return {**facts, "memory_bytes": 2**30, "peak_bytes": 3 * 2**29, "budget_bytes": 3 * 2**30, **changes}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_every_log_steps_and_at_both_ends() -> None:
    out = io.StringIO()
    progress = Progress(25, log_steps=10, stream=out)
    progress.start()
    for step in range(1, 26):
        progress.step(reading(step))
    progress.stop()
    lines = out.getvalue().splitlines()
    assert [line.split("/")[0].split()[-1] for line in lines] == ["1", "10", "20", "25"]
    assert lines[1].startswith("step 10/25  40%  loss 2.500  lr 1.0e-03  1,234 tokens/s  ")
    assert "memory 1.00 GiB, peak 1.50 GiB of 3.00 GiB" in lines[1]
    assert "\x1b" not in out.getvalue()


def test_no_line_is_wider_than_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    speak("zh")
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    out = Terminal()
    clock = Clock()
    sizes = {
        "memory_bytes": 1023 * 2**20 + 2**19,
        "peak_bytes": 3 * 2**40,
        "budget_bytes": 3 * 2**40,
        "loss": 12345.678,
    }
    progress = Progress(1_000_000, stream=out, clock=clock)
    progress.start()
    for step in (1, 2, 3, 999_998):
        clock.now += 90_000.0
        progress.step(reading(step, **sizes))
    progress.table("计划", [("预计峰值", "能用编译内核之处，用编译内核计算。" * 6), ("why", "words between them " * 9)])
    progress.sample("a prompt of many words " * 8, "回答" * 60)
    progress.stop()
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert max(width(line.rstrip()) for line in screen.replace("\r", "\n").split("\n")) <= 80
    assert not re.search(r"\x1b\[[0-9;]*[39][0-9]", out.getvalue()), "NO_COLOR is heeded"
    assert "步    " in screen and "还需" in screen


def test_quiet_shows_warnings_alone_other_processes_nothing_and_dumb_terminals_plain_lines() -> None:
    out = io.StringIO()
    other = io.StringIO()
    dumb = Terminal()
    for progress in (Progress(2, is_quiet=True, log_steps=1, stream=out), Progress(2, is_main=False, stream=other)):
        progress.start()
        progress.step(reading(1))
        progress.note("x")
        progress.table("t", [("a", "b")])
        progress.lines("t", ["x"])
        progress.sample("a", "b")
        progress.warn("the disk is nearly full")
        progress.stop()
    assert (out.getvalue(), other.getvalue()) == ("the disk is nearly full\n", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "dumb")
        Progress(1, stream=dumb).step(reading(1))
    assert "\x1b" not in dumb.getvalue() and "step 1/1" in dumb.getvalue()
