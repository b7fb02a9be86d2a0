"""The memory controller keeps a run inside its budget: it checks memory after steps and switches to a smaller plan if
needed.

Each check collects several targets, in bytes, for what the run may hold from now on: its budget; what other programs
and lowered limits leave, measured again; and less if memory grows from step to step, or stays in use after a cleanup.
The lowest target counts. If the run needs more than that, by the measured peak of its steps, it continues with the
fastest plan that fits, or else with the next smaller one; effective batch and weights stay the same. Memory that is
still in use after everything was freed is added to the need of every plan. An out-of-memory error is answered in the
same way. If there is no smaller plan and the run is over its limit, `exhausted` tells the caller to save and end it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from devices.base import Device
from memory.budget import Budget
from memory.cleanup import Cleaner, CleanupRecord, Shortage, free_failed
from memory.estimate.peaks import FIXED
from memory.monitor import Monitor
from memory.plan import Plan
from memory.step_settings import StepSettings
from memory.system_limits import free_host_bytes, margin_of
from settings.errors import DoesNotFit
from settings.fields import AUTO, counted
from support.language import say
from support.units import format_size

CHECK_SECONDS = 1.0  # The least time between two checks.
PRESSURE = 0.97  # If more than this share of the budget is in use, memory is cleaned up at once.
# After a cleanup the next one waits for so many times its duration, so that cleanups take under 1% of a run.
CLEANUP_PAUSE = 100.0
STEPS_AHEAD = 2  # A check and the switch to a smaller plan take two steps.
# If available memory falls by less than this share of the safety margin, the budget stays: small programs come and go.
DRIFT_SHARE = 0.25
# The malloc setting "untrimmed", which keeps freed memory, is given up above this share of the budget. Plans with it
# are made for at most 0.8 of the budget.
UNTRIMMED_SHARE = 0.85
LESS_AFTER_ERROR = 0.3  # After an out-of-memory error the next plan must take this share less of temporary memory.
GROWTH_STEPS = 96  # A leak is looked for in so many last steps,
GROWTH_PARTS = 4  # These steps are divided into so many parts.
LEAST_GROWTH = 0.005  # Growth from part to part by less than this share of the budget is noise.
FORESIGHT = 200  # A leak makes the plan smaller if it would reach the budget within so many steps.
ADVICE = "a larger --memory_budget, a smaller --max_seq_len or a smaller --model_preset"


class Log(Protocol):
    """Where the controller reports what it does; implemented by `training.report.run_log.RunLog`."""

    def event(self, name: str, sentence: str = "", /, **fields: Any) -> None: ...
    def memory(self, step: int, phase: str) -> None: ...
    def plan(self, plan: Plan) -> None: ...


class Target(NamedTuple):
    """An upper limit for what a run may hold from now on.

    Args:
        size: in bytes.
        reason: a key for the log: "peak", "budget", "growth", "pressure" or "out of memory".
        sentence: the reason in words, for the user.
        margin: bytes above `size` that may be used if no plan fits into `size`.
    """

    size: int
    reason: str
    sentence: str
    margin: int = 0


def growth_of(shares: Sequence[float]) -> float:
    """By how much memory grows with each step, as a share of the budget; 0 if it does not grow steadily.

    The steps are divided into GROWTH_PARTS parts, and the minimum of each part has to be higher than that of the part
    before: neither fluctuations nor a single jump count as growth.

    Args:
        shares: memory held after each of the last steps, as shares of the budget.
    """
    if len(shares) < GROWTH_STEPS:
        return 0.0
    minima = np.reshape(shares, (GROWTH_PARTS, -1)).min(1)
    rise = float(np.diff(minima).min())
    return rise * GROWTH_PARTS / GROWTH_STEPS if rise > LEAST_GROWTH else 0.0


class MemoryController:
    """Keeps one run inside its budget.

    Args:
        settings: the step settings that the user fixed; AUTO where the plan decides.
        plan: the plan at the start.
        budget: the budget at the start.
        make_plan: (settings, budget) -> the fastest plan that fits; raises DoesNotFit.
        measure_budget: returns the budget as it is now.
        shape: the longest rows in words, "512 + 114 tokens", for messages.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        settings: StepSettings,
        plan: Plan,
        budget: Budget,
        make_plan: Callable[[StepSettings, Budget], Plan],
        measure_budget: Callable[[], Budget],
        *,
        device: Device,
        monitor: Monitor,
        log: Log,
        shape: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.budget = budget  # The lowest that was measured so far.
        self.exhausted: str | None = None  # A sentence for the user once the run is over its limit and cannot shrink.
        self.cleaner = Cleaner(device)
        self._settings = settings
        self._make_plan = make_plan
        self._measure_budget = measure_budget
        self._device = device
        self._monitor = monitor
        self._log = log
        self._shape = shape
        self._clock = clock
        self._first_budget = plan.budget_bytes
        self._largest_unfit_bytes = 0  # The largest limit for which no plan was found.
        self._unreachable_bytes = 0  # The last target that no smaller plan could reach.
        self._peak_bytes = 0  # The measured peak of steps under the present plan.
        self._bytes_after_steps = deque[int](maxlen=GROWTH_STEPS)  # Memory held after each step under the present plan.
        self._last_check = clock()
        self._next_cleanup = self._last_check
        self._available_bytes = budget.available_bytes  # At the last check.
        self._last_fall_bytes = 0  # Available memory fell by this between the last two checks.

    @property
    def allowed_bytes(self) -> int:
        """The most that the run may hold: its plan's budget; if that was lowered during the run, with the margin.

        The margin is what the budget leaves free below a limit of the system.
        """
        budget = self.plan.budget_bytes
        margin = 0 if self._device.is_separate_memory else self.budget.margin_bytes
        return max(budget, min(self._first_budget, budget + margin))

    def before(self, what: str, step: int) -> None:
        """Clean up before a phase such as "epoch" or "evaluation", which needs much memory."""
        self._report_cleanup(step, self.cleaner.before(what))

    def before_step(self, done: int, rows: int) -> None:
        """Clean up if the next step is the first one that reads rows of a new epoch.

        Args:
            done: number of steps so far.
            rows: number of rows of the training data.
        """
        batch = self.plan.effective_batch_size
        if done and done * batch // rows > (done - 1) * batch // rows:
            self.before("epoch", done)

    def after_step(self, step: int) -> bool:
        """Clean up on schedule, check memory at most once a second, and take a smaller plan if the run needs too much.

        Returns whether `plan` was replaced.
        """
        record = self.cleaner.after_step(step)
        if record is not None:
            self._report_cleanup(step, record)
        self._bytes_after_steps.append(self._monitor.plan_bytes())
        if not self._device.is_separate_memory:  # A GPU reports only the peak of the whole run.
            # The peaks of other phases, such as the training of a tokenizer, say nothing about the steps.
            self._peak_bytes = max(self._peak_bytes, self._monitor.counted_phase_peaks.get("train", 0))
        now = self._clock()
        if now - self._last_check < CHECK_SECONDS:
            return False
        self._last_check = now
        needs = max(self._peak_bytes or self.plan.peak_bytes, self.budget.used())
        targets = self._targets(needs)
        target = min(targets)
        # Before a plan is chosen memory is cleaned up, even during the pause after the last cleanup.
        is_new = needs > target.size and target.size != self._unreachable_bytes
        is_pressed = needs > target.size or self._monitor.pressure() > PRESSURE
        if is_new or (is_pressed and now >= self._next_cleanup):
            self._report_cleanup(step, self.cleaner.under_pressure())
            self._monitor.sample()
            self._next_cleanup = self._clock() + CLEANUP_PAUSE * (self._clock() - now)
            share = self.budget.used() / self.allowed_bytes  # With a GPU, of its memory: no plan frees RAM of the host.
            if share > PRESSURE:
                in_use = say("{share} of the budget is in use, and cleanup did not help", share=f"{share:.0%}")
                target = min(target, Target(int(PRESSURE * self.allowed_bytes), "pressure", in_use))
        if needs <= target.size:
            return False
        if self._shrink(step, target):
            return True
        self._unreachable_bytes = target.size
        # A short peak above the run's own budget does not end the run. A peak above what other programs leave may get
        # it killed, and memory that stays in use above the budget breaks the promise.
        is_over_limit = target.reason == "budget" and needs > target.size + target.margin
        if is_over_limit or self.budget.used() > self.allowed_bytes:
            self._give_up(target.sentence)
        return False

    def after_out_of_memory(self, error: BaseException, step: int) -> None:
        """Free the failed step and take a smaller plan; the caller runs the same rows again, or ends if `exhausted`."""
        shortage = free_failed(error, self._device)
        sentence = shortage.describe("train", self.plan.choice.batch_size_per_gpu, self._shape)
        size = int(self.plan.peak_bytes - LESS_AFTER_ERROR * (self.plan.peak_bytes - self.budget.used()))
        if not self._shrink(step, Target(size, "out of memory", sentence), shortage):
            self._give_up(sentence)

    def after_evaluation_out_of_memory(self, error: BaseException, step: int) -> None:
        """Free the failed evaluation and halve its micro-batch; if that was a single row, the run is `exhausted`."""
        shortage = free_failed(error, self._device)
        rows = self.plan.choice.eval_batch_size_per_gpu
        sentence = shortage.describe("evaluation", rows, self._shape)
        if rows == 1:
            self._give_up(sentence)
            return
        self.plan = replace(self.plan, choice=replace(self.plan.choice, eval_batch_size_per_gpu=rows // 2))
        report = say(
            "{story}; evaluating the same rows again with micro-batch {micro}", story=sentence, micro=rows // 2
        )
        self._report_recovery(step, "evaluation", "out of memory", report, rows, rows // 2, shortage)

    def _targets(self, needs: int) -> list[Target]:
        """The targets of a check: by the budget, by what other programs leave, and by growth.

        Args:
            needs: bytes that the run needs, measured.
        """
        budget = self._measure_budget()
        if budget.limit() < self.budget.limit():
            self.budget = budget
            self._monitor.watch(max(budget.host_bytes, 1), from_now=True)
        share = UNTRIMMED_SHARE if self.plan.choice.malloc == "untrimmed" else 1.0
        sentence = say(
            "steps take {peak}, and the budget is {budget}",
            peak=format_size(needs),
            budget=format_size(self.allowed_bytes),
        )
        targets = [Target(int(share * self.allowed_bytes), "peak", sentence)]
        forecast = self._forecast(budget)
        if needs - DRIFT_SHARE * forecast.margin > forecast.size and forecast.size < self.plan.budget_bytes:
            sentence = say(
                "{size} will be left ({why}), and the plan needs {planned}",
                size=format_size(forecast.size),
                why=say(budget.binding),
                planned=format_size(needs),
            )
            targets.append(forecast._replace(sentence=sentence))
        growth = self._growth(budget.limit(), needs)
        if growth is not None:
            targets.append(growth)
        return targets

    def _forecast(self, budget: Budget) -> Target:
        """What other programs will leave at the check after next, if they continue to take memory; at most the present
        limit.
        """
        limit = Target(budget.limit(), "budget", "", 0 if budget.is_on_device else budget.margin_bytes)
        fall = self._available_bytes - budget.available_bytes
        # Only a fall in two checks in a row continues; a single one is a lowered limit, or a program that was started.
        steady_fall = max(0, min(fall, self._last_fall_bytes))
        self._available_bytes = budget.available_bytes
        self._last_fall_bytes = fall
        if budget.is_on_device:  # A smaller plan would free no RAM of the host, which `available` is about.
            return limit
        available = budget.available_bytes - STEPS_AHEAD * steady_fall
        margin = margin_of(available)
        return min(limit, Target(available - margin, "budget", "", margin))

    def _growth(self, limit: int, needs: int) -> Target | None:
        """The target that keeps growing memory below the limit for FORESIGHT steps; None if memory does not grow.

        A heap that still grows below the planned peak is left alone.
        """
        peak = self._device.memory_peak_bytes() if self._device.is_separate_memory else needs
        growth = int(limit * growth_of([size / limit for size in self._bytes_after_steps]))
        if not growth or peak <= self.plan.peak_bytes:
            return None
        sentence = say(
            "memory grows by {pace} per step and would reach the budget in {steps}",
            pace=format_size(growth),
            steps=counted(max(0, limit - peak) // growth, "step"),
        )
        return Target(limit - FORESIGHT * growth, "growth", sentence)

    def _shrink(self, step: int, target: Target, shortage: Shortage | None = None) -> bool:
        """Continue with the fastest plan within a target, or else the next smaller one; False if there is none."""
        old = self.plan
        smaller = self._smaller_plan(target)
        if smaller is None:
            return False
        # Measurements of the old plan say nothing about the new one.
        self._peak_bytes = 0
        self._unreachable_bytes = 0
        self._bytes_after_steps.clear()
        if not self._device.is_separate_memory:
            self._monitor.watch(self._monitor.budget_bytes, from_now=True)
        self.plan = replace(smaller, budget_bytes=min(self.budget.limit(), old.budget_bytes))
        rows = smaller.choice.batch_size_per_gpu
        report = say(
            "{story}; continuing with micro-batch {micro} x accumulation {times}, {recomputed}, effective batch "
            "unchanged",
            story=target.sentence,
            micro=rows,
            times=smaller.choice.gradient_accumulation_steps,
            recomputed=smaller.recomputed(),
        )
        self._report_recovery(step, "train", target.reason, report, old.choice.batch_size_per_gpu, rows, shortage)
        self._log.plan(self.plan)
        return True

    def _smaller_plan(self, target: Target) -> Plan | None:
        present = self.plan
        fixed = sum(part for name, part in present.components.items() if name in FIXED)
        lasting = max(fixed, self.budget.used())  # Stays in use under every plan.
        temporary = max(1, present.peak_bytes - fixed)
        ratio = max(1.0, (self._peak_bytes - lasting) / temporary)  # Measured over planned temporary memory.
        # If nothing else fits, the user's own division into micro-batches is given up.
        relaxed = replace(
            self._settings,
            memory_mode=AUTO,
            gradient_checkpointing=AUTO,
            batch_size_per_gpu=AUTO,
            gradient_accumulation_steps=AUTO,
        )
        limits = [target.size]
        # The second try uses the margin as well. It is skipped if the present plan already fits with it.
        if lasting + ratio * temporary - DRIFT_SHARE * target.margin > target.size + target.margin:
            limits.append(target.size + target.margin)
        for limit in limits:
            # The planned peak of a plan whose real need, by the measurements above, is the limit:
            most = min(int(fixed + (limit - lasting) / ratio), present.peak_bytes - 1)
            if most > self._largest_unfit_bytes:
                for settings in (self._settings, relaxed):
                    with suppress(DoesNotFit):
                        return self._make_plan(settings, self.budget.child(most))
                self._largest_unfit_bytes = most
        rows = present.choice.batch_size_per_gpu
        if not present.choice.saved_blocks:
            rows //= 2
        # A run that takes more than planned needs a smaller micro-batch, even if it is predicted not to help.
        if rows and target.reason != "budget":
            most = max(self.budget.limit(), present.peak_bytes)
            with suppress(DoesNotFit):
                next_smaller = replace(relaxed, batch_size_per_gpu=rows, gradient_checkpointing=True)
                return self._make_plan(next_smaller, self.budget.child(most))
        return None

    def _give_up(self, sentence: str) -> None:
        self.exhausted = say(
            "{story}; nothing more can be reduced. What helps most: {advice}", story=sentence, advice=say(ADVICE)
        )

    def _report_cleanup(self, step: int, record: CleanupRecord) -> None:
        self._log.event("cleanup", step=step, kind=record.kind, freed_bytes=record.freed_bytes, reason=record.reason)
        if record.kind == "full" and record.reason in ("schedule", "pressure"):
            self._log.memory(step, "train")

    def _report_recovery(
        self, step: int, phase: str, reason: str, report: str, old_rows: int, rows: int, shortage: Shortage | None
    ) -> None:
        shortage = shortage or Shortage(None, free_host_bytes())
        self._log.event(
            "recovery",
            report,
            step=step,
            phase=phase,
            reason=reason,
            old_batch_size=old_rows,
            batch_size=rows,
            gradient_accumulation_steps=self.plan.choice.gradient_accumulation_steps,
            needed_bytes=shortage.needed_bytes,
            free_bytes=shortage.free_bytes,
            report=report,
        )
