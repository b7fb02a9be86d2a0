"""How far a long reading is stands on one line of the screen, and in a file for other programs."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from data.progress import ProgressLine, noted_in


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_it_is_shown_now_and_then(stream: io.StringIO, tmp_path: Path) -> None:
    now = [0.0]
    with (
        noted_in(tmp_path / "note"),
        ProgressLine("preparing train", 1000, stream, lambda: now[0]) as progress,
    ):
        for _ in range(40):
            now[0] += 1.0
            progress.add(100, 2 * 10**6, "file 2 of 3")
    screen = stream.getvalue()
    assert "preparing train: 1,200 rows, 100 rows/s, 2.0 MB/s, file 2 of 3" in screen
    assert (screen.count("\r") > 20) == stream.isatty() and screen.count("\n") == (0 if stream.isatty() else 4)
    note = json.loads((tmp_path / "note").read_text())
    assert note["what"] == "preparing train" and note["rows_per_second"] == 100.0


def test_the_work_goes_on_where_nobody_looks_and_nothing_can_be_noted(tmp_path: Path) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with noted_in(tmp_path / "missing" / "note"), ProgressLine("p", 0, Gone(), iter([0.0, 10.0]).__next__) as progress:
        progress.add(1, 10)


@pytest.mark.parametrize("columns", [40, 200])
def test_the_line_fits_its_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider one would leave its first part behind at each renewal."""
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    stream = Terminal()
    stream.fileno = lambda: 1  # type: ignore[method-assign]
    ProgressLine("为分词器读取数据" * 4, 0, stream, iter([0.0, 9.0]).__next__).add(9_000, 4_000_000, "file 1 of 2")
    line = stream.getvalue().removeprefix("\r")
    assert sum(2 if letter > "\u2e80" else 1 for letter in line) == min(118, columns - 1)
