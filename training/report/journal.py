"""What is reported of a run, and where? To the screen, to the log, and to metrics.jsonl, each event once.

The trainer says what has happened; which of the three hears of it, and in which words, is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from loguru import logger

from config import PREFERENCES, Config
from data.sources.places import public_values
from data.text.templates import Template
from language import english, join, say
from memory.cleanup import CleanupRecord
from memory.cost.disk import disk_need
from memory.cost.duration import Renewal
from memory.cost.prediction import Choice
from memory.observe.monitor import Monitor
from memory.plan import Plan
from memory.recovery import RecoveryRecord
from model.shapes import weight_counts
from settings.errors import UserError
from settings.fields import counted
from training.report.card import push_command
from training.report.endings import SAVE, STOP
from training.report.heartbeat import Heartbeat
from training.report.progress import Progress, Reading
from training.report.results import Evaluation, Sample, named_rows
from training.report.summary import Summary, next_commands, plan_rows, recomputed, summary_rows
from training.report.tracking import Listener, MetricsFile, open_log
from training.report.wording import about, duration
from units import format_size

WATCH_SECONDS = 50.0  # from one line about memory to the next, at most; heartbeats come every two seconds


class Journal:
    """Reports on one run; a context, so that the terminal is whole again whatever happens.

    Args:
        config: of the run, its schedule resolved. start_step: steps done by earlier parts of the run.
        monitor: whose records go into metrics.jsonl.
        is_main: other processes tell nothing. listeners: hear of each event, as it stands in metrics.jsonl; one that returns
            "stop" or "save" wishes for that behind the step. clock: seconds that only grow.
    Raises:
        UserError: `log_dir` cannot be written.
    """

    def __init__(
        self,
        config: Config,
        start_step: int,
        monitor: Monitor,
        is_main: bool,
        *,
        listeners: Sequence[Listener] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        run, train = config.run, config.train
        self.monitor, self._clock = monitor, clock
        self._renewal: Renewal | None = None
        self._began, self._promise = clock(), ""
        self._watched = clock()  # when the log last told of memory
        self.progress = Progress(
            int(train.max_steps), is_main, train.log_steps, start_step=start_step, is_quiet=run.quiet
        )
        self._log = open_log(run.log_dir, run.run_name, is_main, console=self.progress.warn)
        self.metrics = MetricsFile(
            f"{run.log_dir}/{run.run_name}/metrics.jsonl", train.is_keep_training is True, is_main,
            [partial(self._ask, listener) for listener in listeners],
        )  # fmt: skip
        self._wish = ""
        if train.is_keep_training:
            self.metrics.truncate_after(start_step)
        monitor.report_to(lambda record: self.metrics.write("memory", **record))
        self._step, self._max_steps = start_step, int(train.max_steps)
        self._heartbeat = Heartbeat(Path(run.log_dir, run.run_name), self._facts, is_main)

    def __enter__(self) -> Journal:
        self.progress.start()
        self._heartbeat.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.__exit__(kind, error, trace)
        with suppress(UserError):  # a full disk, which has been told
            for line in _ending_words(error):
                logger.info("{}", line)
        self.progress.stop()
        self.metrics.close()

    def tell(self, text: str) -> None:
        """Say something on the screen and, in English, in the log."""
        self.progress.note(text)
        logger.info(english(text))

    def keep(self, texts: Sequence[str]) -> None:
        """Put into the log what was on the screen before there was one."""
        for text in texts:
            logger.info(english(text))

    def rows(self, table: Sequence[tuple[str, str]]) -> None:
        """The first rows, as the model sees them."""
        self._table(say("rows as the model sees them"), table)

    def _table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """The same rows on the screen and in the log: who looks a day later has the log alone."""
        self.progress.table(title, rows)
        logger.info("{}:", english(title))
        for name, text in rows:
            logger.info("{}: {}", english(name), english(text))

    def wish(self) -> str:
        """What a listener, or somebody from outside, has asked for since the last call; see `training.report.heartbeat`."""
        wish, self._wish = self._wish, ""
        return wish or self._heartbeat.wish()

    def _ask(self, listener: Listener, event: dict[str, Any]) -> None:
        """Let a listener hear of an event; a wish to stop is kept whatever others wish."""
        wish = listener(dict(event))
        if wish in (STOP, SAVE) and self._wish != STOP:
            self._wish = wish

    def _facts(self) -> dict[str, Any]:
        """What each sign of life tells."""
        monitor, now = self.monitor, self._clock()
        if now - self._watched >= WATCH_SECONDS:  # a step may be longer than a minute
            self._watched = now
            with suppress(UserError):  # the log's disk is full for a moment: the sign of life goes on
                logger.info(monitor.line(self._step))
        return {
            "step": self._step, "max_steps": self._max_steps, "log": str(self._log),
            "peak_bytes": monitor.peak_bytes, "budget_bytes": monitor.budget_bytes, **monitor.latest(),
        }  # fmt: skip

    def begin(self, config: Config, plan: Plan, step: int) -> None:
        """What will be done, and the plan for it."""
        settings = public_values(config.as_dict())
        self.metrics.write("start", step=step, time=time.time(), run_name=config.run.run_name, settings=settings)
        self.plan(plan)
        self._began = self._clock()
        if plan.seconds_total is not None and plan.seconds_low is not None and plan.seconds_high is not None:
            self._promise = about(plan.seconds_total, plan.seconds_low, plan.seconds_high)
        self._renewal = Renewal(plan.seconds, plan.seconds_total, int(config.train.max_steps) - step)
        rows = plan_rows(plan, weight_counts(config.model)["total"])
        disk = disk_need(config, plan.choice.storage, plan.choice, plan.seconds).describe()
        self._table(say("plan"), [*rows, (say("disk"), disk)])

    def plan(self, plan: Plan) -> None:
        """The choice, for programs; and how much of a step is recomputed, for readers of the log."""
        logger.info("activation checkpointing: {}", recomputed(plan.choice.saved_blocks, plan.num_blocks))
        self.metrics.write("plan", **plan.as_dict())

    def step(self, reading: Reading, tokens: int, seconds: float, choice: Choice, extra: dict[str, float]) -> None:
        """One optimizer step; `extra` are further figures of it. Once, after the first ones, the time that is left."""
        left = None if self._renewal is None else self._renewal.after_step(seconds)
        if left is not None:
            extra = {
                **extra,
                "seconds_left": left.seconds,
                "seconds_left_low": left.low,
                "seconds_left_high": left.high,
            }
        self._step = reading.step
        self.metrics.write(
            "step", step=reading.step, loss=reading.loss, learning_rate=reading.learning_rate, tokens=tokens,
            seconds=round(seconds, 4), tokens_per_second=round(reading.tokens_per_second, 1),
            batch_size_per_gpu=choice.batch_size_per_gpu,
            gradient_accumulation_steps=choice.gradient_accumulation_steps, memory_bytes=reading.memory_bytes,
            peak_bytes=reading.peak_bytes, time=round(time.time(), 2), **extra,
        )  # fmt: skip
        logger.debug(
            "step {} loss {:.4f} lr {:.2e} {:.0f} tokens/s memory {} peak {} of {}",
            reading.step, reading.loss, reading.learning_rate, reading.tokens_per_second,
            *map(format_size, (reading.memory_bytes, reading.peak_bytes, reading.budget_bytes)),
        )  # fmt: skip
        self.progress.step(reading)
        if left is not None:
            time_left = about(left.seconds, left.low, left.high)
            self.tell(say("step {step}: {time} left, from the steps so far", step=reading.step, time=time_left))

    def over(self, reading: Reading) -> None:
        """The budget was exceeded for the first time."""
        self.tell(
            say(
                "step {step}: the peak of {peak} is over the budget of {budget}; the run goes on, saves, and ends with exit code 3",
                step=reading.step,
                peak=format_size(reading.peak_bytes),
                budget=format_size(reading.budget_bytes),
            )
        )

    def evaluation(
        self, step: int, result: Evaluation, scores: dict[str, float], samples: Sequence[Sample] = (), averaged: int = 0
    ) -> None:
        """The loss on held-out rows; `scores` are those of answers, `samples` answers beside what the data says.

        Args:
            averaged: checkpoints whose mean was evaluated; 0: the weights of the step.
        """
        of = {"averaged_checkpoints": averaged} if averaged else {}
        self.metrics.write("eval", step=step, **result.figures(), **scores, **of)
        further = [f", {name} {value:.3f}" for name, value in {**result.metrics, **scores}.items()]
        if not result.metrics:  # of tokens, not of preferences
            further.insert(0, say(", perplexity {perplexity}", perplexity=f"{result.perplexity:,.1f}"))
        self.tell(
            say(
                "step {step}: evaluation loss {loss}{further} ({rows})",
                step=step, loss=f"{result.loss:.4f}", further=join("", further), rows=counted(result.rows, "row"),
            )
        )  # fmt: skip
        for sample in samples:
            self.progress.sample(sample.prompt, sample.answer, sample.reference)
            self.metrics.write("sample", step=step, **asdict(sample))
        self.memory(step, "evaluation")

    def memory(self, step: int, phase: str) -> None:
        """A memory record: one line of the log, one event."""
        self._watched = self._clock()
        self.monitor.record(step, phase)
        logger.info(self.monitor.line(step))

    def cleanup(self, step: int, record: CleanupRecord) -> None:
        """What a cleaning gave back; those that are full and come inside training leave a memory record."""
        self.metrics.write("cleanup", step=step, kind=record.kind, freed_bytes=record.freed_bytes, reason=record.reason)
        if record.kind == "full" and record.reason in ("schedule", "pressure"):
            self.memory(step, "train")

    def recovery(self, step: int, record: RecoveryRecord) -> None:
        """What was changed because memory did not suffice."""
        self.metrics.write("recovery", step=step, **record.as_dict())
        self.tell(record.report)

    def rolled_back(self, step: int, reason: str) -> None:
        """The run continues from an earlier step: the events after it did not happen, but for why it had to go back."""
        self.metrics.truncate_after(step, spared="recovery")
        report = say("{reason}: continuing after step {step}", reason=reason, step=step)
        self.metrics.write("recovery", step=step, reason="rolled back", report=report)
        self.tell(report)

    def left_out(self, step: int, rows: list[int], place: str | None) -> None:
        """A batch was passed over because the step that read it was not finite.

        Args:
            rows: their numbers. place: where it began, in words, if that is known.
        """
        values = {"step": step, "rows": named_rows(rows)}
        if place:
            report = say("step {step}: inf or nan, first in {place}; left out {rows}", place=place, **values)
        else:
            report = say("step {step}: inf or nan; left out {rows}", **values)
        self.metrics.write("recovery", step=step, reason="not finite", rows=rows, place=place, report=report)
        self.tell(report)

    def checkpoint(self, step: int, path: Any, is_best: bool) -> None:
        """A checkpoint was written."""
        self.metrics.write("checkpoint", step=step, path=str(path), best=is_best)
        logger.info("step {} saved to {}", step, path)

    def end(self, summary: Summary, config: Config, prompt: str) -> None:
        """The summary, and what may be typed next."""
        figures = {name: value for name, value in asdict(summary).items() if name != "steps"}
        taken = self._clock() - self._began
        self.metrics.write("end", step=summary.steps, seconds_since_plan=round(taken, 3), **figures)
        rows = summary_rows(summary)
        if self._promise:
            told = say("{time} since the plan, which said {promise}", time=duration(taken), promise=self._promise)
            rows.insert(-1, (say("time"), told))
        self._table(say("done"), rows)
        template = Template.read(summary.model_dir) or Template()  # generate puts it around the question by itself
        is_tuned = config.train.is_finetune or config.data.objective == PREFERENCES
        lines = next_commands(summary.model_dir, is_tuned, template.question(prompt))
        self.progress.lines(say("next"), [*lines, push_command(Path(summary.model_dir))])
        if config.run.quiet:
            self.progress.warn(summary.model_dir)


def _ending_words(error: BaseException | None) -> list[str]:
    """How a run has ended, for its log: a crash has its traceback there."""
    if error is None:
        return ["ended: all done"]
    if isinstance(error, UserError):
        return [f"ended: {line}" for problem in error.problems for line in english(problem).splitlines()]
    if isinstance(error, KeyboardInterrupt):
        return [
            f"ended: {line.strip()}" for line in (english(error.args[0]) if error.args else "interrupted").splitlines()
        ]
    return []
