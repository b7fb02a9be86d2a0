"""The memory controller keeps a run inside its budget: it looks after a step, and makes the run smaller where it has
to.

It collects what the run may hold from here on: its budget; the budget measured again, since others take memory and
limits are lowered; less than that where memory grows from step to step, or is in use although it was cleaned. The least
decides. Where the run needs more, by the measured peak of its steps, there is one answer: the fastest plan that holds
no more, else the next smaller one, with the same effective batch and the same weights. What stays behind once
everything is freed counts against every plan. After an out-of-memory error the answer is the same. Where nothing
smaller is left and the run is over its limit, it is to be saved and ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from devices.base import Device
from language import say
from memory.budget import Budget
from memory.cleanup import Cleaner, CleanupRecord, Shortage, free_failed
from memory.estimate.peaks import FIXED
from memory.monitor import Monitor
from memory.plan import Plan
from memory.system_limits import free_host_bytes, margin_of
from settings.declared import Config
from settings.errors import DoesNotFit
from settings.fields import AUTO, counted
from units import format_size

LOOK_SECONDS = 1.0  # Between two looks.
PRESSURE = 0.97  # Share of the budget in use from which memory is cleaned at once.
REST_FACTOR = 100.0  # Times what a cleaning took, before the next one: they stay under 1% of the run.
STEPS_AHEAD = 2  # Within which another look is taken, and a smaller plan runs.
DRIFT_SHARE = 0.25  # Of the margin below a limit: small things of the system take so much, and it is no smaller budget.
UNTRIMMED_SHARE = 0.85  # Of the budget, above which freed memory is not kept; a plan that keeps it begins below 0.8.
LESS_AFTER_ERROR = 0.3  # Of temporary memory: so much less the next plan takes after an out-of-memory error.
GROWTH_STEPS = 96  # The last steps, which are looked at for growth.
GROWTH_PARTS = 4  # Of these steps.
LEAST_GROWTH = 0.005  # Of the budget from part to part: less is noise.
FORESIGHT = 200  # Steps within which growth would reach the budget.
# What the user fixed is given up where nothing else fits.
FIXED_BY_USER = ("memory_mode", "gradient_checkpointing", "batch_size_per_gpu", "gradient_accumulation_steps")
ADVICE = "a larger --memory_budget, a smaller --max_seq_len or a smaller --model_preset"


class Log(Protocol):
    """Where the controller reports what it does, as `training.report.run_log.RunLog`."""

    def event(self, name: str, sentence: str = "", /, **fields: Any) -> None: ...
    def memory(self, step: int, phase: str) -> None: ...
    def plan(self, plan: Plan) -> None: ...


def growth_of(shares: Sequence[float]) -> float:
    """How much more is held after each step, in shares of the budget; 0 where there is no growth.

    Only the least of each part of the steps counts, and it has to rise every time: what comes and goes is no growth,
    nor is a single step up.
    """
    if len(shares) < GROWTH_STEPS:
        return 0.0
    least = np.reshape(shares, (GROWTH_PARTS, -1)).min(1)
    rise = float(np.diff(least).min())
    return rise * GROWTH_PARTS / GROWTH_STEPS if rise > LEAST_GROWTH else 0.0


class MemoryController:
    """Keeps one run inside its budget.

    Args:
        config: of the run, with which smaller plans are made. plan, budget: as it begins.
        make_plan: (config, budget) -> the fastest plan that fits; raises DoesNotFit.
        measure: the budget of now.
        shape: words for the longest rows, "512 + 114 tokens".
        clock: seconds, which only go forward.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        budget: Budget,
        make_plan: Callable[[Config, Budget], Plan],
        measure: Callable[[], Budget],
        *,
        device: Device,
        monitor: Monitor,
        log: Log,
        shape: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.budget = budget  # The least so far.
        self.exhausted: str | None = None  # Why the run cannot go on: nothing is left to shrink.
        self.cleaner = Cleaner(device)
        self._config = config
        self._make_plan = make_plan
        self._measure = measure
        self._device = device
        self._monitor = monitor
        self._log = log
        self._shape = shape
        self._clock = clock
        self._first_budget = plan.budget_bytes
        self._too_little = 0  # Bytes in which no plan fits.
        self._peak = 0  # Measured, of the steps under this plan.
        self._shares = deque[float](maxlen=GROWTH_STEPS)  # Of the budget, held after steps under this plan.
        self._looked = self._rest_until = clock()
        self._available = budget.available_bytes
        self._fall = 0  # Of what is available, at the last look.

    @property
    def allowed_bytes(self) -> int:
        """What the run may reach: its budget, and where others have lowered that, the margin below the limit."""
        budget = self.plan.budget_bytes
        return max(budget, min(self._first_budget, budget + self._margin()))

    def before(self, what: str, step: int) -> None:
        """Clean before a phase that needs much memory, as "epoch" or "evaluation"."""
        self._report_cleanup(step, self.cleaner.before(what))

    def before_step(self, done: int, rows: int) -> None:
        """Clean where the next step is the first that reads rows of another epoch.

        Args:
            done: steps so far. rows: of the training data.
        """
        batch = self.plan.effective_batch_size
        if done and done * batch // rows > (done - 1) * batch // rows:
            self.before("epoch", done)

    def after_step(self, step: int) -> bool:
        """Clean if it is time, look once a second, and shrink where the run needs too much. Returns whether there is a
        new plan.
        """
        record = self.cleaner.after_step(step)
        if record is not None:
            self._report_cleanup(step, record)
        self._shares.append(self._monitor.plan_pressure())
        if not self._device.is_separate_memory:  # The peak of such a device is of the whole run, not of this plan.
            # What other phases held, such as the training of a tokenizer, says nothing of the steps.
            of_steps = min(self._monitor.phase_peaks.get("train", 0), self._monitor.counted_peak_bytes)
            self._peak = max(self._peak, of_steps)
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        needs = max(self._peak or self.plan.peak_bytes, self.budget.used())
        limits = self._limits(needs)
        if now >= self._rest_until and (needs > min(limits)[0] or self._monitor.pressure() > PRESSURE):
            self._report_cleanup(step, self.cleaner.under_pressure())
            self._monitor.sample()
            self._rest_until = self._clock() + REST_FACTOR * (self._clock() - now)
            share = self.budget.used() / self.allowed_bytes  # A smaller plan frees no RAM beside a GPU.
            if share > PRESSURE:
                in_use = say("{share} of the budget is in use, and cleanup did not help", share=f"{share:.0%}")
                limits.append((int(PRESSURE * self.allowed_bytes), "pressure", in_use))
        size, reason, story = min(limits)
        if needs <= size:
            return False
        if self._shrink(step, size, reason, story):
            return True
        # A moment above its own budget is no end of a run; above a limit of the system it may be.
        if self.budget.used() > self.allowed_bytes or (reason == "budget" and needs > size + self._margin()):
            self._give_up(story)
        return False

    def after_out_of_memory(self, error: BaseException, step: int) -> None:
        """Free the failed step and take a smaller plan; the caller runs the same rows again, or ends if `exhausted`."""
        shortage = free_failed(error, self._device)
        story = shortage.describe("train", self.plan.choice.batch_size_per_gpu, self._shape)
        size = int(self.plan.peak_bytes - LESS_AFTER_ERROR * (self.plan.peak_bytes - self.budget.used()))
        if not self._shrink(step, size, "out of memory", story, shortage):
            self._give_up(story)

    def after_evaluation_out_of_memory(self, error: BaseException, step: int) -> None:
        """Free the failed evaluation and halve its micro-batch; the run is `exhausted` where it was one row."""
        shortage = free_failed(error, self._device)
        rows = self.plan.choice.eval_batch_size_per_gpu
        story = shortage.describe("evaluation", rows, self._shape)
        if rows == 1:
            self._give_up(story)
            return
        self.plan = replace(self.plan, choice=replace(self.plan.choice, eval_batch_size_per_gpu=rows // 2))
        report = say("{story}; evaluating the same rows again with micro-batch {micro}", story=story, micro=rows // 2)
        self._report_recovery(step, "evaluation", "out of memory", report, rows, rows // 2, shortage)

    def _limits(self, needs: int) -> list[tuple[int, str, str]]:
        """What the run may hold from here on, in bytes, and why: in a word, and in a sentence."""
        budget = self._measure()
        limit = budget.limit()
        if limit < self.budget.limit():
            self.budget = budget
            self._monitor.watch(max(budget.host_bytes, 1), from_now=True)
        fall = self._available - budget.available_bytes
        steady_fall = max(0, min(fall, self._fall))  # A single fall is a lowered limit, or a program that has started.
        self._available = budget.available_bytes
        self._fall = fall
        left = budget.available_bytes - STEPS_AHEAD * steady_fall
        soon = limit
        if not budget.is_on_device:  # A smaller plan frees no RAM beside a GPU.
            soon = min(limit, left - margin_of(left))
        peak = format_size(needs)
        share = UNTRIMMED_SHARE if self.plan.choice.malloc == "untrimmed" else 1.0
        story = say("steps take {peak}, and the budget is {budget}", peak=peak, budget=format_size(self.allowed_bytes))
        limits: list[tuple[int, str, str]] = [(int(share * self.allowed_bytes), "peak", story)]
        if needs - DRIFT_SHARE * self._margin() > soon and soon < self.plan.budget_bytes:
            story = say(
                "{size} will be left ({why}), and the plan needs {planned}",
                size=format_size(soon),
                why=say(budget.binding),
                planned=peak,
            )
            limits.append((soon, "budget", story))
        growth = int(limit * growth_of(self._shares))
        if growth and needs > self.plan.peak_bytes:  # A heap that fills up to what was planned is left alone.
            story = say(
                "memory grows by {pace} per step and would reach the budget in {steps}",
                pace=format_size(growth),
                steps=counted(max(0, limit - needs) // growth, "step"),
            )
            limits.append((limit - FORESIGHT * growth, "growth", story))
        return limits

    def _margin(self) -> int:
        """What may be held above a limit of the system, where no plan fits otherwise."""
        return 0 if self._device.is_separate_memory else self.budget.margin_bytes

    def _shrink(self, step: int, size: int, reason: str, story: str, shortage: Shortage | None = None) -> bool:
        """Go on by the fastest plan within a size, or else the next smaller one. Returns whether there is one."""
        old = self.plan
        smaller = self._smaller_plan(size, reason)
        # What was held until now is answered, and no reason for the next plan.
        self._peak = 0
        self._shares.clear()
        if not self._device.is_separate_memory:
            self._monitor.watch(self._monitor.budget_bytes, from_now=True)
        if smaller is None:
            return False
        self.plan = replace(smaller, budget_bytes=min(self.budget.limit(), old.budget_bytes))
        rows = smaller.choice.batch_size_per_gpu
        report = say(
            "{story}; continuing with micro-batch {micro} x accumulation {times}, {recomputed}, effective batch "
            "unchanged",
            story=story,
            micro=rows,
            times=smaller.choice.gradient_accumulation_steps,
            recomputed=smaller.recomputed(),
        )
        self._report_recovery(step, "train", reason, report, old.choice.batch_size_per_gpu, rows, shortage)
        self._log.plan(self.plan)
        return True

    def _smaller_plan(self, size: int, reason: str) -> Plan | None:
        present = self.plan
        fixed = sum(part for name, part in present.components.items() if name in FIXED)
        held = max(fixed, self.budget.used())  # What no plan gives back.
        temporary = max(1, present.peak_bytes - fixed)
        ratio = max(1.0, (self._peak - held) / temporary)  # Of what steps have taken to what was planned for them.
        relaxed = self._config.changed(**dict.fromkeys(FIXED_BY_USER, AUTO))
        limits = [size]
        # The margin is used where no plan fits otherwise, unless the present one already does with it.
        if held + ratio * temporary - DRIFT_SHARE * self._margin() > size + self._margin():
            limits.append(size + self._margin())
        for limit in limits:
            most = min(int(fixed + (limit - held) / ratio), present.peak_bytes - 1)
            if most > self._too_little:
                for config in (self._config, relaxed):
                    with suppress(DoesNotFit):
                        return self._make_plan(config, self.budget.child(most))
                self._too_little = most
        rows = present.choice.batch_size_per_gpu
        if not present.choice.saved_blocks:
            rows //= 2
        # A run that takes more than its plan said needs smaller shapes, whatever the formulas say of them.
        if rows and reason != "budget":
            most = max(self.budget.limit(), present.peak_bytes)
            with suppress(DoesNotFit):
                next_smaller = relaxed.changed(batch_size_per_gpu=rows, gradient_checkpointing=True)
                return self._make_plan(next_smaller, self.budget.child(most))
        return None

    def _give_up(self, story: str) -> None:
        self.exhausted = say(
            "{story}; nothing more can be reduced. What helps most: {advice}", story=story, advice=say(ADVICE)
        )

    def _report_cleanup(self, step: int, record: CleanupRecord) -> None:
        self._log.event("cleanup", step=step, kind=record.kind, freed_bytes=record.freed_bytes, reason=record.reason)
        if record.kind == "full" and record.reason in ("schedule", "pressure"):
            self._log.memory(step, "train")

    def _report_recovery(
        self, step: int, phase: str, reason: str, report: str, before: int, rows: int, shortage: Shortage | None
    ) -> None:
        shortage = shortage or Shortage(None, free_host_bytes())
        self._log.event(
            "recovery",
            report,
            step=step,
            phase=phase,
            reason=reason,
            old_batch_size=before,
            batch_size=rows,
            gradient_accumulation_steps=self.plan.choice.gradient_accumulation_steps,
            needed_bytes=shortage.needed_bytes,
            free_bytes=shortage.free_bytes,
            report=report,
        )
