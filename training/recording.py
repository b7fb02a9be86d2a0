"""What is measured of a run's steps, and told: the plan before them, each as it is done, the summary behind them."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path

from loguru import logger

from common.language import say
from common.units import format_size
from data.sources.places import public_values
from data.text.templates import Template
from engine.step import Done
from memory.estimate.disk import disk_need
from memory.estimate.time import Renewal
from memory.plan import Plan
from model.shapes import weight_counts
from settings.declared import Config
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
        self.live, self._plan = live, plan
        # done here: a run that is continued has done others before
        self._steps, self._seconds, self._tokens = 0, 0.0, 0
        self._first_over: int | None = None  # the step after which the peak was first above the budget
        self._over_bytes = 0  # the highest peak above the budget of its plan; smaller plans are counted anew
        steps = int(live.train.max_steps) - live.state.step
        self._renewal = Renewal(plan.seconds, plan.seconds_total, steps)

    def step(self, outcome: Done, labels: float, rate: float, tokens: int, seconds: float) -> None:
        """Report the step that was just done. Once, after the first ones, the time that is left.

        Args:
            labels: what the mean loss is over. rate: the learning rate. tokens: read by all.
        """
        live, log, plan = self.live, self.live.log, self.live.controller.plan
        self._steps += 1
        self._seconds += seconds
        self._tokens += tokens
        now = live.monitor.sample("train")
        used = now.device_bytes + (0 if live.device.is_separate_memory else now.anon_bytes)
        mean, speed = outcome.loss / max(labels, 1), tokens / seconds
        step, peak = live.state.step, self._peak_bytes()
        figures = mean_metrics(live.engine.blockwise.objective, labels, live.group)
        update = live.engine.update
        if update.scaling is not None and not math.isfinite(outcome.norm):
            figures["skipped_at_loss_scale"] = update.scaling.scale
        if live.device.name == "cpu":  # elsewhere the host is done before the device is, or waits for it in a move
            figures["update_seconds"] = round(update.seconds, 4)
            figures |= {"weights_wait_seconds": round(update.waited_seconds, 4)} if plan.choice.offloaded_blocks else {}
        left, time_left = self._renewal.after_step(seconds), ""
        if left is not None:
            figures |= {"seconds_left": left.seconds, "seconds_left_low": left.low, "seconds_left_high": left.high}
            time_left = say(
                "step {step}: {time} left, measured on the steps so far",
                step=step,
                time=about(left.seconds, left.low, left.high),
            )
        logger.debug(
            "step {} loss {:.4f} lr {:.2e} {:.0f} tokens/s memory {} peak {} of {}",
            step,
            mean,
            rate,
            speed,
            *map(format_size, (used, peak, plan.budget_bytes)),
        )
        log.event(
            "step",
            time_left,
            step=step,
            loss=mean,
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
        log = self.live.log
        is_ram, held, most = self._counted()
        if held > self.live.controller.plan.budget_bytes and not is_ram:
            self._over_bytes = max(self._over_bytes, held)
        if self._first_over is None and held > most:
            self._first_over = step
            what = say("RAM") if is_ram else say("the peak")
            log.tell(
                say(
                    "step {step}: {what} of {peak} exceeds the budget of {budget}; the run continues, saves, and ends "
                    "with exit code 3",
                    step=step,
                    what=what,
                    peak=format_size(held),
                    budget=format_size(most),
                )
            )

    def end(self, prompt: str) -> Summary:
        """The summary, and what may be typed next, with `prompt` as an example."""
        live = self.live
        log = live.log
        summary = self.summary()
        figures = {name: value for name, value in asdict(summary).items() if name != "steps"}
        taken = log.seconds()
        log.event("end", step=summary.steps, seconds_since_plan=round(taken, 3), **figures)
        log.table(say("done"), result_rows(summary))
        template = Template.read(summary.model_dir) or Template()  # generate puts it around the question by itself
        leads_to_finetuning = live.task.leads_to_finetuning(live.train.is_finetune)
        lines = next_commands(summary.model_dir, leads_to_finetuning, template.question(prompt))
        if live.output.push_to_hub is None:
            lines = [*lines, push_command(Path(summary.model_dir))]
        log.progress.lines(say("next"), lines)
        rows = detail_rows(summary)
        if promise := promised_time(self._plan):
            rows.insert(1, (say("time"), say("{time} (predicted: {promise})", time=duration(taken), promise=promise)))
        log.table(say("details"), rows)
        if live.output.quiet:
            log.progress.warn(summary.model_dir)
        return summary

    def summary(self) -> Summary:
        """What was planned and measured, for the end."""
        live, state, monitor, controller = self.live, self.live.state, self.live.monitor, self.live.controller
        has_own_memory = live.device.is_separate_memory
        counted = int(live.group.all_reduce_max(max(monitor.counted_peak_bytes, self._over_bytes))[0])
        return Summary(
            steps=state.step,
            steps_here=self._steps,
            seconds=self._seconds,
            tokens_per_second=self._tokens / max(self._seconds, 1e-9),
            first_eval_loss=state.first_eval_loss,
            best_eval_loss=state.best_eval_loss,
            best_evaluation=state.best_evaluation,
            planned_peak_bytes=self._plan.peak_bytes,
            measured_peak_bytes=int(live.group.all_reduce_max(self._peak_bytes())[0]),
            budget_bytes=controller.plan.budget_bytes,
            phase_peaks=dict(monitor.phase_peaks),
            host_peak_bytes=int(live.group.all_reduce_max(monitor.counted_peak_bytes)[0]) if has_own_memory else None,
            counted_peak_bytes=None if has_own_memory else counted,
            host_budget_bytes=monitor.budget_bytes if has_own_memory else None,
            care_seconds=monitor.cost_seconds + controller.cleaner.total_seconds,
            watched_seconds=monitor.watched_seconds(),
            first_over=live.group.first_of(self._over()),
            model_dir=str(live.run.run_dir),
            metrics_file=str(live.log.path),
            skipped_batches=len(live.divergence.skipped),
            rate_factor=live.divergence.rate_factor,
        )

    def _over(self) -> str | None:
        live = self.live
        if self._first_over is not None:
            when = say("at step {step}", step=self._first_over)
        elif (counted := self._counted())[1] > counted[2]:
            peaks = live.monitor.phase_peaks
            phase = max(peaks, key=lambda phase: peaks[phase], default="save")
            when = say("after the last step, in {phase}", phase=phase)
        else:
            return None
        return when if live.is_main else say("{when}, on process {rank}", when=when, rank=live.group.rank)

    def _counted(self) -> tuple[bool, int, int]:
        """Of the plan's memory, or of RAM beside it where that is nearer to its budget: whether it is RAM, peak, and
        budget.

        RAM is counted since the budget is what it is: the machine may have had more to give before.
        """
        device, monitor, budget = self.live.device, self.live.monitor, self.live.controller.allowed_bytes
        if not device.is_separate_memory:
            return False, monitor.counted_peak_bytes, budget
        kinds = (False, device.memory_peak_bytes(), budget), (True, monitor.counted_peak_bytes, monitor.budget_bytes)
        return max(kinds, key=lambda kind: kind[1] / max(1, kind[2]))

    def _peak_bytes(self) -> int:
        device = self.live.device
        return device.memory_peak_bytes() if device.is_separate_memory else self.live.monitor.peak_bytes
