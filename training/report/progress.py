"""What does the user see while a run is going? A live line on a terminal, plain lines elsewhere.

All text for the screen passes through here, so that nothing breaks the live line. Only the main process shows anything.
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from screen import raw, visible
from units import format_size

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

UNTIMED_STEPS = 3  # the first steps warm caches up and would spoil the estimate of the time left
BAR_WIDTH = 24


@dataclass
class Reading:
    """What one step tells. Bytes are those of the process tree, or of the device where it has its own memory."""

    step: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    memory_bytes: int
    peak_bytes: int
    budget_bytes: int


class Progress:
    """The display of one run; a context, so that the terminal is whole again whatever happens.

    Args:
        max_steps: the run's last step.
        is_main: whether this process shows anything.
        log_steps: steps between two plain lines.
        start_step: steps done by an earlier part of this run.
        stream: where to write; standard output by default.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        max_steps: int,
        is_main: bool = True,
        log_steps: int = 10,
        *,
        start_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_steps, self.is_main, self.log_steps, self.start_step = max_steps, is_main, log_steps, start_step
        self._stream = raw(stream or sys.stdout)
        self._clock = clock
        self._timed_from: tuple[int, float] | None = None
        self._console: Console | None = None
        self._live: Live | None = None
        if is_main and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console

            self._console = Console(file=self._stream, highlight=False)

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to show steps. `note` and `table` work before, too."""
        if self._console is not None and self._live is None:
            from rich.live import Live

            self._live = Live("", console=self._console, refresh_per_second=4)
            self._live.start()

    def stop(self) -> None:
        """Leave the last state on the screen and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, reading: Reading) -> None:
        """Show one finished step."""
        if not self.is_main:
            return
        left = self._seconds_left(reading.step)
        if self._live is not None:
            self._live.update(_live_lines(reading, self.max_steps, left))
        elif reading.step % self.log_steps == 0 or reading.step in (self.start_step + 1, self.max_steps):
            self._print(plain_line(reading, self.max_steps, left))

    def note(self, text: str) -> None:
        """Show text of one or more lines above the live line."""
        if self.is_main:
            self._print(text)

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Show rows of cells under a title, columns aligned."""
        self.note("\n".join([title, *(f"  {line}" for line in aligned(rows))]))

    def sample(self, prompt: str, answer: str, reference: str = "") -> None:
        """Show one generated answer beside what the data says, each cut to one line."""
        rows = [("prompt", _one_line(prompt)), ("answer", _one_line(answer))]
        if reference:
            rows.append(("reference", _one_line(reference)))
        self.note("\n".join(f"  {line}" for line in aligned(rows)))

    def _print(self, text: str) -> None:
        text = visible(text)
        if self._console is not None:
            self._console.print(text, markup=False, soft_wrap=True)
            return
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:  # the reader has left, as `head` does: the run goes on, its log tells the rest
            if self._stream is sys.stdout:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._stream = open(os.devnull, "w", encoding="utf8")  # noqa: SIM115  # for the rest of the process

    def _seconds_left(self, step: int) -> float | None:
        now = self._clock()
        if self._timed_from is None:
            if step - self.start_step >= UNTIMED_STEPS:
                self._timed_from = (step, now)
            return None
        first, since = self._timed_from
        return (now - since) / (step - first) * (self.max_steps - step) if step > first else None


def plain_line(reading: Reading, max_steps: int, seconds_left: float | None) -> str:
    """One step as one line of text."""
    parts = [
        f"step {reading.step:>{len(str(max_steps))}}/{max_steps} {reading.step / max_steps:4.0%}",
        *_figures(reading),
        f"memory {_memory_words(reading)}",
    ]
    return "  ".join([*parts, f"{duration(seconds_left)} left"] if seconds_left is not None else parts)


def duration(seconds: float) -> str:
    """Show a time as people read it: `42s`, `3:05 min`, `2:07 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02} h"


def about(seconds: float, low: float, high: float) -> str:
    """Show an estimate as people read it: `about 3 h 20 min, between 2 h 50 min and 4 h`."""
    middle, least, most = _roughly(seconds), _roughly(low), _roughly(high)
    return f"about {middle}" if least == most else f"about {middle}, between {least} and {most}"


def _roughly(seconds: float) -> str:
    """As fine as an estimate can be: seconds up to 90, minutes up to 1 h, tens of minutes up to 2 days, then hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        hours, tens = divmod(round(seconds / 600), 6)
        return f"{hours} h {10 * tens} min" if tens else f"{hours} h"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} days {hours} h" if hours else f"{days} days"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad all cells but the last of each row to the width of their column."""
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), _width(cell))
    return [
        "  ".join([*(cell + " " * (widths[column] - _width(cell)) for column, cell in enumerate(row[:-1])), *row[-1:]])
        for row in rows
    ]


def _width(text: str) -> int:
    """Columns that text takes on a terminal: Chinese letters take two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _one_line(text: str, letters: int = 160) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= letters else flat[: letters - 3] + "..."


def _figures(reading: Reading) -> list[str]:
    return [
        f"loss {reading.loss:.3f}",
        f"lr {reading.learning_rate:.1e}",
        f"{reading.tokens_per_second:,.0f} tokens/s",
    ]


def _memory_words(reading: Reading) -> str:
    now, peak, budget = (format_size(size) for size in (reading.memory_bytes, reading.peak_bytes, reading.budget_bytes))
    return f"{now}, peak {peak} of {budget}"


def _live_lines(reading: Reading, max_steps: int, seconds_left: float | None) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    left = "" if seconds_left is None else f"{duration(seconds_left)} left"
    share = min(reading.peak_bytes / max(reading.budget_bytes, 1), 1.0)  # the peak may pass the budget; a bar cannot
    color = "red" if share > 0.97 else "yellow" if share > 0.85 else "green"
    done = ProgressBar(max_steps, reading.step, width=BAR_WIDTH, complete_style="cyan", finished_style="cyan")
    used = ProgressBar(1.0, share, width=BAR_WIDTH, complete_style=color, finished_style=color)
    bars = Table.grid(padding=(0, 2))
    bars.add_row("step", done, f"{reading.step}/{max_steps} {reading.step / max_steps:.0%}  {left}")
    bars.add_row("memory", used, _memory_words(reading))
    return Group(bars, Text("  ".join(_figures(reading)), no_wrap=True, overflow="ellipsis"))
