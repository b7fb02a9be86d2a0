"""What is measured of a run's steps, and told: the plan before them, each as it is done, the summary behind them."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path

from loguru import logger

from data.sources.places import public_values
from data.text.templates import Template
from engine.step import Done
from memory.estimate.disk import disk_need
from memory.estimate.time import Renewal
from memory.plan import Plan
from model.shapes import weight_counts
from settings.declared import Config
from support.language import say
from support.units import format_size
from training.evaluation.losses import mean_metrics
from training.live import LiveRun
from training.report.card import push_command
from training.report.run_log import RunLog
from training.report.summary import (
    Summary,
    detail_rows,
    next_commands,
    parts_rows,
    plan_rows,
    promised_time,
    result_rows,
)
from training.report.wording import about, duration


def announce(log: RunLog, config: Config, plan: Plan, step: int, train_rows: int, reopens: bool) -> None:
    """What will be done from a step on, with `train_rows` an epoch, and the plan for it.

    Args:
        reopens: whether data files are opened anew for every read.
    """
    settings = public_values(config.as_dict())
    log.event(
        "start", step=step, time=time.time(), run_name=config.run.run_name, train_rows=train_rows, settings=settings
    )
    log.plan(plan)
    disk = disk_need(config, plan.choice.storage, plan.choice, plan.seconds).describe()
    log.table(say("plan"), plan_rows(plan, weight_counts(config.model)["total"], reopens, disk))
    log.table(say("parts of the peak"), parts_rows(plan), is_shown=False)
    log.memory(step, "start")


class Recorder:
    """Measures one run, from its first plan on."""

    def __init__(self, live: LiveRun, plan: Plan) -> None:
        self.live = live
        self._plan = plan
        # Steps, time and tokens of this start: a run that is continued has done others before.
        self._steps = 0
        self._seconds = 0.0
        self._tokens = 0
        self._first_over: int | None = None  # The step after which the peak was first above the budget.
        self._over_bytes = 0  # The highest peak above the budget of its plan; smaller plans are counted anew.
        steps = int(live.train.max_steps) - live.state.step
        self._renewal = Renewal(plan.seconds, plan.seconds_total, steps)

    def step(self, outcome: Done, labels: float, rate: float, tokens: int, seconds: float) -> None:
        """Report the step that was just done. Once, after the first ones, the time that is left.

        Args:
            labels: what the mean loss is over. rate: the learning rate. tokens: read by all.
        """
        live = self.live
        plan = live.controller.plan
        step = live.state.step
        self._steps += 1
        self._seconds += seconds
        self._tokens += tokens
        sample = live.monitor.sample("train")
        used = sample.device_bytes + (0 if live.device.is_separate_memory else sample.anon_bytes)
        loss = outcome.loss / max(labels, 1)
        speed = tokens / seconds
        peak = self._peak_bytes()
        figures = mean_metrics(live.engine.blockwise.objective, labels, live.group)
        update = live.engine.update
        if update.scaling is not None and not math.isfinite(outcome.norm):
            figures["skipped_at_loss_scale"] = update.scaling.scale
        if live.device.name == "cpu":  # Elsewhere the host is done before the device is, or waits for it in a move.
            figures["update_seconds"] = round(update.seconds, 4)
            if plan.choice.offloaded_blocks:
                figures["weights_wait_seconds"] = round(update.waited_seconds, 4)
        remaining = self._renewal.after_step(seconds)
        time_left: str = ""
        if remaining is not None:
            figures["seconds_left"] = remaining.seconds
            figures["seconds_left_low"] = remaining.low
            figures["seconds_left_high"] = remaining.high
            time_left = say(
                "step {step}: {time} left, measured on the steps so far",
                step=step,
                time=about(remaining.seconds, remaining.low, remaining.high),
            )
        logger.debug(
            "step {} loss {:.4f} lr {:.2e} {:.0f} tokens/s memory {} peak {} of {}",
            step,
            loss,
            rate,
            speed,
            *map(format_size, (used, peak, plan.budget_bytes)),
        )
        live.log.event(
            "step",
            time_left,
            step=step,
            loss=loss,
            learning_rate=rate,
            tokens=tokens,
            seconds=round(seconds, 4),
            tokens_per_second=round(speed, 1),
            batch_size_per_gpu=plan.choice.batch_size_per_gpu,
            gradient_accumulation_steps=plan.choice.gradient_accumulation_steps,
            memory_bytes=used,
            peak_bytes=peak,
            budget_bytes=plan.budget_bytes,
            time=round(time.time(), 2),
            **figures,
        )
        self.note_peak(step)

    def note_peak(self, step: int) -> None:
        """Remember and tell where a step, done or failed, took more than the budget."""
        is_ram, peak_bytes, budget_bytes = self._tightest_memory()
        if peak_bytes > self.live.controller.plan.budget_bytes and not is_ram:
            self._over_bytes = max(self._over_bytes, peak_bytes)
        if self._first_over is None and peak_bytes > budget_bytes:
            self._first_over = step
            text = (
                "step {step}: {what} of {peak} exceeds the budget of {budget}; the run continues, saves, and ends "
                "with exit code 3"
            )
            what = say("RAM") if is_ram else say("the peak")
            peak = format_size(peak_bytes)
            self.live.log.tell(say(text, step=step, what=what, peak=peak, budget=format_size(budget_bytes)))

    def end(self, prompt: str) -> Summary:
        """The summary, and what may be typed next, with `prompt` as an example."""
        live = self.live
        log = live.log
        summary = self.summary()
        figures = {name: value for name, value in asdict(summary).items() if name != "steps"}
        seconds = log.seconds()
        log.event("end", step=summary.steps, seconds_since_plan=round(seconds, 3), **figures)
        log.table(say("done"), result_rows(summary))
        template = Template.read(summary.model_dir) or Template()  # `generate` puts it around the question by itself.
        leads_to_finetuning = live.task.leads_to_finetuning(live.train.is_finetune)
        lines = next_commands(summary.model_dir, live.shape.head, leads_to_finetuning, template.question(prompt))
        if live.output.push_to_hub is None:
            lines = [*lines, push_command(Path(summary.model_dir))]
        log.progress.lines(say("next"), lines)
        rows = detail_rows(summary)
        promise = promised_time(self._plan)
        if promise:
            text = "{time} (predicted: {promise})"
            rows.insert(1, (say("time"), say(text, time=duration(seconds), promise=promise)))
        log.table(say("details"), rows)
        if live.output.quiet:
            log.progress.warn(summary.model_dir)
        return summary

    def summary(self) -> Summary:
        """What was planned and measured, for the end."""
        live = self.live
        state = live.state
        monitor = live.monitor
        host_peak_bytes, counted_peak_bytes, measured_peak_bytes = map(
            int,
            live.group.all_reduce_max(
                monitor.counted_peak_bytes, max(monitor.counted_peak_bytes, self._over_bytes), self._peak_bytes()
            ),
        )
        has_own_memory = live.device.is_separate_memory
        return Summary(
            steps=state.step,
            steps_here=self._steps,
            seconds=self._seconds,
            tokens_per_second=self._tokens / max(self._seconds, 1e-9),
            first_eval_loss=state.first_eval_loss,
            best_eval_loss=state.best_eval_loss,
            best_evaluation=state.best_evaluation,
            planned_peak_bytes=self._plan.peak_bytes,
            measured_peak_bytes=measured_peak_bytes,
            budget_bytes=live.controller.plan.budget_bytes,
            phase_peaks=dict(monitor.phase_peaks),
            host_peak_bytes=host_peak_bytes if has_own_memory else None,
            counted_peak_bytes=None if has_own_memory else counted_peak_bytes,
            host_budget_bytes=monitor.budget_bytes if has_own_memory else None,
            care_seconds=monitor.cost_seconds + live.controller.cleaner.total_seconds,
            watched_seconds=monitor.watched_seconds(),
            first_over=live.group.first_of(self._when_over()),
            model_dir=str(live.run.run_dir),
            metrics_file=str(live.log.path),
            skipped_batches=len(live.divergence.skipped),
            rate_factor=live.divergence.rate_factor,
        )

    def _when_over(self) -> str | None:
        live = self.live
        _, peak_bytes, budget_bytes = self._tightest_memory()
        if self._first_over is None and peak_bytes <= budget_bytes:
            return None
        peaks = live.monitor.phase_peaks
        when = say("after the last step, in {phase}", phase=max(peaks, key=peaks.__getitem__, default="save"))
        if self._first_over is not None:
            when = say("at step {step}", step=self._first_over)
        return when if live.is_main else say("{when}, on process {rank}", when=when, rank=live.group.rank)

    def _tightest_memory(self) -> tuple[bool, int, int]:
        """Of the plan's memory, or of RAM beside it where that is nearer to its budget: whether it is RAM, peak, and
        budget.

        RAM is counted since the budget is what it is: the machine may have had more to give before.
        """
        device = self.live.device
        monitor = self.live.monitor
        budget = self.live.controller.allowed_bytes
        if not device.is_separate_memory:
            return False, monitor.counted_peak_bytes, budget
        on_device = (False, device.memory_peak_bytes(), budget)
        in_ram = (True, monitor.counted_peak_bytes, monitor.budget_bytes)
        return max(on_device, in_ram, key=lambda kind: kind[1] / max(1, kind[2]))

    def _peak_bytes(self) -> int:
        device = self.live.device
        return device.memory_peak_bytes() if device.is_separate_memory else self.live.monitor.peak_bytes
