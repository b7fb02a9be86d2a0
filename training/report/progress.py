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

from support.language import Message, join, say
from support.screen import raw, visible
from support.terminal import aligned, folded, one_line, width
from support.units import format_size
from training.report.wording import duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

UNTIMED_STEPS = 3  # The first steps warm caches up and would spoil the estimate of the time left.
BAR_WIDTH = 24
Event = Mapping[str, Any]  # A record of metrics.jsonl.


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
        self.max_steps = max_steps
        self.log_steps = log_steps
        self.start_step = start_step
        self.is_main = is_main
        self._is_quiet = is_quiet
        self._stream = raw(stream or sys.stdout)
        self._clock = clock
        self._timed_from: tuple[int, float] | None = None
        self.seconds_left: float | None = None
        self._last_evaluation: Event | None = None
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
        step = event["step"]
        self._measure(step)
        if self._live is not None:
            self._live.update(self._live_lines(event))
        elif step % self.log_steps == 0 or step in (self.start_step + 1, self.max_steps):
            self.note(self._plain_line(event))

    def evaluation(self, event: Event) -> None:
        """Take up an evaluation, which the live lines show from the next step on."""
        self._last_evaluation = event
        self._best_loss = min(self._best_loss, event["loss"])

    def note(self, text: str) -> None:
        """Show sentences, one a line, above the live lines."""
        if not self._is_quiet:
            self._print(str(text).splitlines())

    def lines(self, title: str, lines: Sequence[str]) -> None:
        """Show lines that may be copied, such as commands, under a title: they are never broken."""
        if not self._is_quiet:
            self._print([title, *("  " + line for line in lines)], may_break=False)

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Show rows of cells under a title, columns aligned. Where a last cell is broken, its lines are aligned too."""
        if self._is_quiet:
            return
        lines = [f"  {line}" for line in aligned(rows)]
        widths = [width(line) - width(row[-1]) for row, line in zip(rows, lines, strict=True) if row]
        self._print([title, *lines] if title else lines, indent=max(widths, default=0))

    def sample(self, prompt: str, answer: str, reference: str = "", is_label: bool = False) -> None:
        """Show one generated answer, or predicted label, beside what the data says, each cut to one line."""
        rows = [
            (say("text") if is_label else say("prompt"), one_line(prompt)),
            (say("prediction") if is_label else say("answer"), one_line(answer)),
        ]
        if reference:
            rows.append((say("label") if is_label else say("reference"), one_line(reference)))
        self.table("", rows)

    def warn(self, text: str) -> None:
        """Show what is shown even to those who want it quiet."""
        self._print(str(text).splitlines())

    def _print(self, lines: Sequence[str], indent: int = 0, may_break: bool = True) -> None:
        if not self.is_main:
            return
        texts = [visible(line) for line in lines]
        try:
            if self._console is None:
                print("\n".join(texts), file=self._stream, flush=True)
                return
            if may_break:
                texts = [part for text in texts for part in folded(text, self._console.width, indent)]
            self._console.print("\n".join(texts), markup=False, soft_wrap=True)
        except OSError:
            # The reader has left, as `head` does, the terminal is gone, or the disk is full: the log has the rest.
            if self._stream is sys.stdout:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            # It stays open for the rest of the process.
            self._stream = open(os.devnull, "w", encoding="utf8")  # noqa: SIM115
            self._console = None

    def _measure(self, step: int) -> None:
        """Estimate the time left from the steps of this start, but for the first ones."""
        now = self._clock()
        if self._timed_from is None:
            if step - self.start_step >= UNTIMED_STEPS:
                self._timed_from = (step, now)
            return
        first_step, first_time = self._timed_from
        if step > first_step:
            self.seconds_left = (now - first_time) / (step - first_step) * (self.max_steps - step)

    def _time_left(self) -> list[str]:
        return [] if self.seconds_left is None else [say("{time} left", time=duration(self.seconds_left))]

    def _plain_line(self, event: Event) -> str:
        """One step as one line of text."""
        step = event["step"]
        number = f"{step:>{len(str(self.max_steps))}}"
        parts = [
            say(
                "step {step}/{total} {share}", step=number, total=self.max_steps, share=f"{step / self.max_steps:4.0%}"
            ),
            say("loss {loss}", loss=f"{event['loss']:.3f}"),
            say("lr {rate}", rate=f"{event['learning_rate']:.1e}"),
            say("{speed} tokens/s", speed=f"{event['tokens_per_second']:,.0f}"),
            say("memory {memory}", memory=_memory_words(event)),
        ]
        return join("  ", [*parts, *self._time_left()])

    def _live_lines(self, event: Event) -> RenderableType:
        """One line a metric: name, bar where it has an end, figures; each cut where the terminal is narrow."""
        from rich.table import Table
        from rich.text import Text

        step = event["step"]
        memory_share = event["peak_bytes"] / max(event["budget_bytes"], 1)
        color = "green"
        if memory_share > 0.97:
            color = "red"
        elif memory_share > 0.85:
            color = "yellow"
        steps = [f"{step}/{self.max_steps} {step / self.max_steps:.0%}", *self._time_left()]
        rate = say("learning rate {rate}", rate=f"{event['learning_rate']:.1e}")
        rows: list[tuple[str, RenderableType, str]] = [
            (say("step"), _bar(step / self.max_steps, "cyan"), join("  ", steps)),
            (say("memory"), _bar(memory_share, color), _memory_words(event)),
            (say("loss"), Text(f"{event['loss']:.3f}"), rate),
        ]
        if self._last_evaluation is not None:
            best = say(
                "at step {step}, lowest {best}", step=self._last_evaluation["step"], best=f"{self._best_loss:.3f}"
            )
            rows.append((say("evaluation"), Text(f"{self._last_evaluation['loss']:.3f}"), best))
        speed = say("{speed} tokens/s", speed=f"{event['tokens_per_second']:,.0f}")
        rows.append((say("speed"), Text(str(speed)), ""))
        lines = Table.grid(padding=(0, 2))
        for _ in range(3):
            lines.add_column(no_wrap=True)
        for name, middle, figures in rows:
            lines.add_row(Text(str(name)), middle, Text(str(figures)))
        return lines


def _memory_words(event: Event) -> Message:
    sizes = {name: format_size(event[f"{name}_bytes"]) for name in ("memory", "peak", "budget")}
    return say("{now}, peak {peak} of {budget}", now=sizes["memory"], peak=sizes["peak"], budget=sizes["budget"])


def _bar(share: float, color: str) -> RenderableType:
    """A bar; it is full where memory has passed its budget."""
    from rich.progress_bar import ProgressBar

    return ProgressBar(1.0, min(share, 1.0), width=BAR_WIDTH, complete_style=color, finished_style=color)
