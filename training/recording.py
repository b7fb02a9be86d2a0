"""What is measured of a run's steps? Each is reported as it is done; together they give the summary."""

from __future__ import annotations

from language import say
from training.evaluation.losses import mean_metrics
from training.live import LiveRun
from training.processes.collectives import first_told, most_of
from training.report.progress import Reading
from training.report.summary import Summary


class Recorder:
    """Measures one run.

    Args:
        live: the run. planned_peak_bytes: what the plan of its beginning says.
    """

    def __init__(self, live: LiveRun, planned_peak_bytes: int) -> None:
        self.live, self._planned_peak_bytes = live, planned_peak_bytes
        # done here: a run that is continued has done others before
        self._steps, self._seconds, self._tokens = 0, 0.0, 0
        self._first_over: int | None = None  # the step after which the peak was first above the budget

    def step(self, loss: float, labels: float, rate: float, tokens: int, seconds: float) -> None:
        """Report the step that was just done.

        Args:
            loss: summed over all processes. labels: what its mean is over. rate: the learning rate. tokens: read by all.
        """
        live, plan = self.live, self.live.keeper.plan
        self._steps += 1
        self._seconds += seconds
        self._tokens += tokens
        now = live.monitor.sample("train")
        used = now.device_bytes + (0 if live.device.is_separate_memory else now.anon_bytes)
        figures = mean_metrics(live.engine.walk.objective, labels, live.accelerator)
        update = live.engine.update
        if update.is_skipped and update.scaling is not None:
            figures["skipped_at_loss_scale"] = update.scaling.scale
        if live.device.name == "cpu":  # elsewhere the host is done before the device is, or waits for it in a move
            figures["update_seconds"] = round(update.seconds, 4)
            figures |= {"weights_wait_seconds": round(live.engine.waited_seconds, 4)} if plan.choice.away_blocks else {}
        mean, speed = loss / max(labels, 1), tokens / seconds
        reading = Reading(live.state.step, mean, rate, speed, used, self._peak_bytes(), plan.budget_bytes)
        live.journal.step(reading, tokens, seconds, plan.choice, figures)
        if self._first_over is None and self._counted_peak_bytes() > plan.budget_bytes:
            self._first_over = reading.step
            live.journal.over(reading)

    def summary(self) -> Summary:
        """What was planned and measured, for the end."""
        live, state, monitor, keeper = self.live, self.live.state, self.live.monitor, self.live.keeper
        return Summary(
            steps=state.step, steps_here=self._steps, seconds=self._seconds, tokens_per_second=self._tokens / max(self._seconds, 1e-9),
            first_eval_loss=state.first_eval_loss, best_eval_loss=state.best_eval_loss,
            best_evaluation=state.best_evaluation,
            planned_peak_bytes=self._planned_peak_bytes, measured_peak_bytes=int(most_of(live.accelerator, self._peak_bytes())[0]),
            budget_bytes=keeper.plan.budget_bytes, phase_peaks=dict(monitor.phase_peaks),
            care_seconds=monitor.cost_seconds + keeper.cleaner.total_seconds, watched_seconds=monitor.watched_seconds(),
            first_over=first_told(live.accelerator, self._over()), model_dir=str(live.start.run_dir), metrics_file=str(live.journal.metrics.path),
            **live.divergence.figures(),
        )  # fmt: skip

    def _over(self) -> str | None:
        """When the budget was first exceeded, in words; None: not on this process."""
        live = self.live
        first = live.keeper.first_over if self._first_over is None else self._first_over
        if first is not None:
            when = say("at step {step}", step=first)
        elif self._counted_peak_bytes() > live.keeper.plan.budget_bytes:
            peaks = live.monitor.phase_peaks
            phase = max(peaks, key=lambda phase: peaks[phase], default="save")
            when = say("after the last step, in {phase}", phase=phase)
        else:
            return None
        return (
            when if live.is_main else say("{when}, on process {rank}", when=when, rank=live.accelerator.process_index)
        )

    def _counted_peak_bytes(self) -> int:
        """The most that was held since the budget is what it is: the machine may have had more to give before."""
        return self._peak_bytes() if self.live.device.is_separate_memory else self.live.monitor.counted_peak_bytes

    def _peak_bytes(self) -> int:
        device = self.live.device
        return device.memory_peak_bytes() if device.is_separate_memory else self.live.monitor.peak_bytes
