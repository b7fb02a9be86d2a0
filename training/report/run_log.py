"""The log of one run: what happened, said once, and heard by all who listen.

An event goes to metrics.jsonl, and from there to trackers and callbacks; a sentence to the screen and, in English, to
the log file; a sign of life every two seconds to `heartbeat.json`. What is said of a step, an evaluation or a recovery
is worded where it happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from loguru import logger

from memory.monitor import Monitor
from memory.plan import Plan
from settings.declared import RunConfig, TrainConfig
from settings.errors import UserError
from support.language import english
from training.report.endings import SAVE, STOP
from training.report.heartbeat import Heartbeat, reason_of_end
from training.report.log_files import MetricsFile, open_log, plain
from training.report.progress import Progress
from training.report.run_files import METRICS_FILE

WATCH_SECONDS = 30.0  # from one line about memory to the next, at most; heartbeats come every two seconds
Listener = Callable[[dict[str, Any]], Any]  # Takes an event.


class RunLog:
    """A context, so that the terminal is whole again whatever happens, and why a run has failed stands in its files.
    Processes but the main one write nothing.

    Args:
        output, train: settings of the run, its schedule resolved. start_step: steps done by earlier parts of the run.
        monitor: whose records are events. sign: of life; its own context ends it.
        listeners: hear of each event, as it stands in metrics.jsonl; one that returns "stop" or "save" requests that
            after the step.
    Raises:
        UserError: `log_dir` cannot be written.
    """

    def __init__(
        self,
        output: RunConfig,
        train: TrainConfig,
        start_step: int,
        monitor: Monitor,
        is_main: bool,
        sign: Heartbeat,
        *,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.monitor = monitor
        self._request = ""
        self._began = time.monotonic()
        self._watched = self._began  # The time of the last line about memory.
        self._step = start_step
        self._planned_peak_bytes: int | None = None  # The newest plan says it.
        self._max_steps = int(train.max_steps)
        self.progress = Progress(
            self._max_steps, is_main, train.log_steps, start_step=start_step, is_quiet=output.quiet
        )
        self._file = open_log(output.log_dir, output.run_name, is_main, self.progress.warn)
        self.path = Path(output.log_dir, output.run_name, METRICS_FILE)
        self._metrics: MetricsFile | None = None
        self._sign = sign
        self._sinks: list[Callable[[dict[str, Any]], None]] = []
        if is_main:
            self._metrics = MetricsFile(self.path, start_step if train.is_keep_training else None)
            self._sinks = [self._metrics.write, *(partial(self._notify, listener) for listener in listeners)]

    def __enter__(self) -> RunLog:
        self._sign.keep()
        return self

    def start(self) -> None:
        """The steps begin: a bar on the screen, and signs of a run that trains."""
        self.progress.start()
        if self._metrics is not None:
            self._sign.run(self.path.parent, self._signs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = "all done" if error is None else english(reason_of_end(error))
        with suppress(UserError):  # A full disk has raised its own error before.
            for line in reason.splitlines():
                logger.info("ended: {}", line.strip())
            if isinstance(error, Exception) and self._metrics is not None:  # A listener may be what has failed.
                self._metrics.write({"event": "failed", "step": self._step, "reason": reason})
        self.progress.stop()
        if self._metrics is not None:
            self._metrics.close()

    def event(self, name: str, sentence: str = "", /, **fields: Any) -> None:
        """Something happened.

        Args:
            sentence: for people. fields: for programs; what JSON lacks becomes what it has.
        """
        record = {"event": name, **{key: plain(value) for key, value in fields.items()}}
        if name == "step":
            self._step = fields["step"]
            self.progress.step(fields)
        elif name == "eval":
            self.progress.evaluation(fields)
        for sink in self._sinks:
            sink(record)
        if sentence:
            self.tell(sentence)

    def tell(self, text: str, is_shown: bool = True) -> None:
        """Say something in the log file and, unless it was there before there was a log, on the screen."""
        if is_shown:
            self.progress.note(text)
        logger.info("{}", english(text))

    def table(self, title: str, rows: Sequence[tuple[str, str]], is_shown: bool = True) -> None:
        """Rows for the log file and, unless they would be too many there, the screen."""
        if is_shown:
            self.progress.table(title, rows)
        logger.info("{}:", english(title))
        for name, text in rows:
            logger.info("{}: {}", english(name), english(text))

    def memory(self, step: int, phase: str) -> None:
        """A memory record: one event, one line of the log file."""
        self._watched = time.monotonic()
        self.event("memory", **self.monitor.record(step, phase))
        logger.info("{}", str(self.monitor.line(step)))  # This line alone is in the user's language.

    def plan(self, plan: Plan) -> None:
        """How the run goes from now on."""
        logger.info("activation checkpointing: {}", english(plan.recomputed()))
        self._planned_peak_bytes = plan.peak_bytes
        self.event("plan", **plan.as_dict())

    def rewind(self, step: int) -> None:
        """The events after a step did not happen, but for why the run had to go back."""
        if self._metrics is not None:
            self._metrics.truncate_after(step, spared="recovery")

    def poll_request(self) -> str:
        """What a listener, or somebody from outside, has asked for since the last call; see
        `training.report.heartbeat`.
        """
        request = self._request or self._sign.poll_request()
        self._request = ""
        return request

    def seconds(self) -> float:
        """Since the log was opened."""
        return time.monotonic() - self._began

    def _notify(self, listener: Listener, event: dict[str, Any]) -> None:
        """Let a listener hear of an event; a request to stop is kept whatever others request."""
        request = listener(dict(event))
        if request in (STOP, SAVE) and self._request != STOP:
            self._request = request

    def _signs(self) -> dict[str, Any]:
        """The facts of each sign of life. As a step may take longer than a minute, memory is logged from here too."""
        now = time.monotonic()
        if now - self._watched >= WATCH_SECONDS:
            self._watched = now
            with suppress(UserError):  # The log's disk may be full for a moment: the sign of life goes on.
                logger.info("{}", str(self.monitor.line(self._step)))
        return {
            "step": self._step,
            "max_steps": self._max_steps,
            "seconds_left": self.progress.seconds_left,
            "log": str(self._file),
            "peak_bytes": self.monitor.peak_bytes,
            "budget_bytes": self.monitor.budget_bytes,
            "planned_peak_bytes": self._planned_peak_bytes,
            **self.monitor.latest(),
        }
