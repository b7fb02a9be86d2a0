"""How far a long reading is, and how fast: one line on the screen that renews itself, or a line now and then elsewhere.

The same stands in a file where one is asked for, as JSON, from which other programs tell how far a run is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TextIO

from settings.fields import counted
from support.language import english, say
from support.screen import raw, visible
from support.terminal import fitted

FIRST_SECONDS = 2.0  # Quick work needs no display.
TERMINAL_SECONDS = 0.5
PLAIN_SECONDS = 10.0
WIDEST = 118  # Columns of the line that renews itself.
NARROWEST = 20
_file: Path | None = None


@contextmanager
def noted_in(file: Path | None) -> Iterator[None]:
    """Let what is shown stand in this file too, until the end of the context; its folder is there, or nothing is
    written.
    """
    global _file
    outer = _file
    _file = file
    try:
        yield
    finally:
        _file = outer


def text_bytes(rows: Iterable[Iterable[str]]) -> int:
    """Bytes of the texts of rows in UTF-8, for a progress line."""
    return sum(len(text.encode("utf8", "replace")) for text in chain.from_iterable(rows))


class ProgressLine:
    """Counts rows and bytes and shows their speed on standard error; a context, which leaves the screen clean.

    Args:
        what: what is done, the beginning of the line.
        rows: rows done by an earlier attempt.
        stream, clock: where to write, and seconds that only grow.
    """

    def __init__(
        self, what: str, rows: int = 0, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.what = what
        self.rows = rows
        self.bytes = 0
        self._rows_before = rows
        self._stream = raw(stream or sys.stderr)
        self._is_terminal = self._stream.isatty()
        self._is_shown = False
        self._clock = clock
        self._began = clock()
        self._next = self._began + FIRST_SECONDS

    def add(self, rows: int, text_bytes: int, where: str = "") -> None:
        """Count rows that are done; `where` names the file."""
        self.rows += rows
        self.bytes += text_bytes
        now = self._clock()
        if now < self._next:
            return
        self._next = now + (TERMINAL_SECONDS if self._is_terminal else PLAIN_SECONDS)
        seconds = max(now - self._began, 1e-9)
        speed = (self.rows - self._rows_before) / seconds
        text = say(
            "{what}: {rows}, {speed} rows/s, {bytes} MB/s",
            what=self.what,
            rows=counted(self.rows, "row"),
            speed=f"{speed:,.0f}",
            bytes=f"{self.bytes / seconds / 1e6:.1f}",
        )
        line = visible(say("{progress}, {file}", progress=text, file=where) if where else text)
        self._write("\r" + fitted(line, self._columns()) if self._is_terminal else line + "\n")
        self._is_shown = True
        if _file is not None:
            with suppress(OSError):
                facts = {"what": english(self.what), "rows": self.rows, "rows_per_second": round(speed, 1)}
                _file.write_text(json.dumps(facts) + "\n", encoding="utf8")

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_shown and self._is_terminal:
            self._write(f"\r{'':<{self._columns()}}\r")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # Where nobody looks any more, the work goes on.
            self._stream.write(text)
            self._stream.flush()

    def _columns(self) -> int:
        """What the line may take: one that is wider than its terminal would leave its first part behind each time."""
        columns = WIDEST + 1
        with suppress(OSError, ValueError):
            columns = os.get_terminal_size(self._stream.fileno()).columns or columns
        return min(WIDEST, max(NARROWEST, columns - 1))
