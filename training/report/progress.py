"""What the user sees while a run is going: a few live lines on a terminal, one line a metric; plain lines elsewhere.

All text for the screen passes through here, so that nothing breaks the live lines. Only the main process shows
anything. On a terminal, sentences and tables are broken between words at its width, as wide as Chinese letters are
there; commands to copy stay whole. Colours are rich's, which heeds NO_COLOR.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from common.language import Message, join, say
from common.screen import raw, visible
from common.terminal import aligned, folded, one_line, width
from common.units import format_size
from training.report.wording import duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

UNTIMED_STEPS = 3  # the first steps warm caches up and would spoil the estimate of the time left
BAR_WIDTH = 24
Event = Mapping[str, Any]  # of a step, as metrics.jsonl has it


class Progress:
    """The display of one run.

    Args:
        max_steps: the run's last step.
        is_main: whether this process shows anything.
        log_steps: steps between two plain lines.
        start_step: steps done by an earlier part of this run.
        is_quiet: whether steps, notes and tables are left out; warnings and results are shown.
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
        is_quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_steps, self.log_steps, self.start_step = max_steps, log_steps, start_step
        self.is_main, self._is_quiet = is_main, is_quiet
        self._stream = raw(stream or sys.stdout)
        self._clock = clock
        self._timed_from: tuple[int, float] | None = None
        self.seconds_left: float | None = None
        self._evaluated: Event | None = None  # the last evaluation
        self._best_loss = math.inf
        self._console: Console | None = None
        self._live: Live | None = None
        if is_main and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console

            self._console = Console(file=self._stream, highlight=False)

    def start(self) -> None:
        """Begin to show steps. `note` and `table` work before, too."""
        if self._console is not None and self._live is None and not self._is_quiet:
            from rich.live import Live

            self._live = Live("", console=self._console, refresh_per_second=4)
            self._live.start()

    def stop(self) -> None:
        """Leave the last state on the screen and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, event: Event) -> None:
        """Show one finished step."""
        number = event["step"]
        seconds = self.seconds_left = self._seconds_left(number)
        left = "" if seconds is None else say("{time} left", time=duration(seconds))
        if not self.is_main or self._is_quiet:
            return
        if self._live is not None:
            self._live.update(_live_lines(event, self.max_steps, left, self._evaluation_words()))
        elif number % self.log_steps == 0 or number in (self.start_step + 1, self.max_steps):
            self._print([_plain_line(event, self.max_steps, left)])

    def evaluation(self, event: Event) -> None:
        """Take up an evaluation, which the live lines show from the next step on."""
        if self.is_main:
            self._evaluated, self._best_loss = event, min(self._best_loss, event["loss"])

    def note(self, text: str) -> None:
        """Show sentences, one a line, above the live lines."""
        self._note(str(text).splitlines())

    def lines(self, title: str, lines: Sequence[str]) -> None:
        """Show lines that may be copied, such as commands, under a title: they are never broken."""
        self._note([title, *("  " + line for line in lines)], may_break=False)

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Show rows of cells under a title, columns aligned."""
        lines = [f"  {line}" for line in aligned(rows)]
        self._note([title, *lines], _hanging(rows, lines))

    def sample(self, prompt: str, answer: str, reference: str = "", is_label: bool = False) -> None:
        """Show one generated answer, or predicted label, beside what the data says, each cut to one line."""
        names = [say("prompt"), say("answer"), say("reference")]
        if is_label:
            names = [say("text"), say("prediction"), say("label")]
        rows = [(name, one_line(text)) for name, text in zip(names, (prompt, answer, reference), strict=True)]
        rows = rows if reference else rows[:2]
        lines = [f"  {line}" for line in aligned(rows)]
        self._note(lines, _hanging(rows, lines))

    def warn(self, text: str) -> None:
        """Show what is shown even to those who want it quiet."""
        if self.is_main:
            self._print(str(text).splitlines())

    def _note(self, lines: Sequence[str], indent: int = 0, may_break: bool = True) -> None:
        if self.is_main and not self._is_quiet:
            self._print(lines, indent, may_break)

    def _print(self, lines: Sequence[str], indent: int = 0, may_break: bool = True) -> None:
        shown = [visible(line) for line in lines]
        try:
            if self._console is not None:
                room = self._console.width
                shown = [part for line in shown for part in (folded(line, room, indent) if may_break else [line])]
                self._console.print("\n".join(shown), markup=False, soft_wrap=True)
            else:
                print("\n".join(shown), file=self._stream, flush=True)
        except OSError:
            # the reader has left, as `head` does, the terminal is gone, or the disk is full: the log tells the rest
            if self._stream is sys.stdout:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            # It stays open for the rest of the process.
            self._stream = open(os.devnull, "w", encoding="utf8")  # noqa: SIM115
            self._console = None

    def _evaluation_words(self) -> tuple[str, str]:
        if self._evaluated is None:
            return "", ""
        step, best = self._evaluated["step"], f"{self._best_loss:.3f}"
        return f"{self._evaluated['loss']:.3f}", say("at step {step}, lowest {best}", step=step, best=best)

    def _seconds_left(self, step: int) -> float | None:
        now = self._clock()
        if self._timed_from is None:
            if step - self.start_step >= UNTIMED_STEPS:
                self._timed_from = (step, now)
            return None
        first, since = self._timed_from
        return (now - since) / (step - first) * (self.max_steps - step) if step > first else None


def _hanging(rows: Sequence[Sequence[str]], lines: Sequence[str]) -> int:
    """Columns before the last cells of a table, under which their second lines begin."""
    return max((width(line) - width(row[-1]) for row, line in zip(rows, lines, strict=True) if row), default=0)


def _plain_line(event: Event, max_steps: int, left: str) -> str:
    """One step as one line of text."""
    number, share = f"{event['step']:>{len(str(max_steps))}}", f"{event['step'] / max_steps:4.0%}"
    parts = [
        say("step {step}/{total} {share}", step=number, total=max_steps, share=share),
        say("loss {loss}", loss=f"{event['loss']:.3f}"),
        say("lr {rate}", rate=f"{event['learning_rate']:.1e}"),
        say("{speed} tokens/s", speed=f"{event['tokens_per_second']:,.0f}"),
        say("memory {memory}", memory=_memory_words(event)),
    ]
    return join("  ", [*parts, left] if left else parts)


def _memory_words(event: Event) -> Message:
    now, peak, budget = (format_size(event[name]) for name in ("memory_bytes", "peak_bytes", "budget_bytes"))
    return say("{now}, peak {peak} of {budget}", now=now, peak=peak, budget=budget)


def _live_lines(event: Event, max_steps: int, left: str, evaluation: tuple[str, str]) -> RenderableType:
    """One line a metric: name, bar where it has an end, figures; each cut where the terminal is narrow."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    step = event["step"]
    share = min(event["peak_bytes"] / max(event["budget_bytes"], 1), 1.0)  # the peak may pass the budget; a bar cannot
    color = "red" if share > 0.97 else "yellow" if share > 0.85 else "green"
    lines = Table.grid(padding=(0, 2))
    for _ in range(3):
        lines.add_column(no_wrap=True)
    rows: list[tuple[str, RenderableType, str]] = [
        (
            say("step"),
            ProgressBar(max_steps, step, width=BAR_WIDTH, complete_style="cyan", finished_style="cyan"),
            join("  ", [f"{step}/{max_steps} {step / max_steps:.0%}", left]),
        ),
        (
            say("memory"),
            ProgressBar(1.0, share, width=BAR_WIDTH, complete_style=color, finished_style=color),
            _memory_words(event),
        ),
        (say("loss"), f"{event['loss']:.3f}", say("learning rate {rate}", rate=f"{event['learning_rate']:.1e}")),
        *([(say("evaluation"), *evaluation)] if evaluation[0] else []),
        (say("speed"), say("{speed} tokens/s", speed=f"{event['tokens_per_second']:,.0f}"), ""),
    ]
    for name, middle, figures in rows:
        lines.add_row(Text(str(name)), Text(str(middle)) if isinstance(middle, str) else middle, Text(str(figures)))
    return lines
