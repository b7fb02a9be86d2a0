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
from typing import Any, NamedTuple, Protocol

import numpy as np

from common.language import say
from common.units import format_size
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

LOOK_SECONDS = 1.0  # Between two looks.
PRESSURE = 0.97  # Share of the budget in use from which memory is cleaned at once.
REST_FACTOR = 100.0  # A rest of so many times what a cleaning took keeps cleanings under 1% of the run.
STEPS_AHEAD = 2  # A look and the change to a smaller plan take two steps.
DRIFT_SHARE = 0.25  # A fall below this share of the margin is no smaller budget: small programs come and go.
# Above this share of the budget freed memory is not kept; a plan that keeps it begins below 0.8.
UNTRIMMED_SHARE = 0.85
LESS_AFTER_ERROR = 0.3  # After an out-of-memory error the next plan takes this share of temporary memory less.
GROWTH_STEPS = 96  # Growth is looked for in so many last steps.
GROWTH_PARTS = 4  # They are cut into so many parts.
LEAST_GROWTH = 0.005  # Less than this share of the budget from part to part is noise.
FORESIGHT = 200  # Growth is answered where it would reach the budget within so many steps.
ADVICE = "a larger --memory_budget, a smaller --max_seq_len or a smaller --model_preset"


class Log(Protocol):
    """Where the controller reports what it does, as `training.report.run_log.RunLog`."""

    def event(self, name: str, sentence: str = "", /, **fields: Any) -> None: ...
    def memory(self, step: int, phase: str) -> None: ...
    def plan(self, plan: Plan) -> None: ...


class Target(NamedTuple):
    """What a run may hold from here on.

    Args:
        size: in bytes. margin: bytes above it that may be held where no plan fits otherwise.
        reason: in a word. sentence: for the user.
    """

    size: int
    reason: str
    sentence: str
    margin: int = 0


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
        settings: what the user fixed of a step. plan, budget: as it begins.
        make_plan: (settings, budget) -> the fastest plan that fits; raises DoesNotFit.
        measure: the budget of now.
        shape: words for the longest rows, "512 + 114 tokens".
        clock: seconds, which only go forward.
    """

    def __init__(
        self,
        settings: StepSettings,
        plan: Plan,
        budget: Budget,
        make_plan: Callable[[StepSettings, Budget], Plan],
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
        self._settings = settings
        self._make_plan = make_plan
        self._measure = measure
        self._device = device
        self._monitor = monitor
        self._log = log
        self._shape = shape
        self._clock = clock
        self._first_budget = plan.budget_bytes
        self._largest_unfit_bytes = 0  # No plan fits into so many bytes.
        self._unanswered_bytes = 0  # The last target for which there was no smaller plan.
        self._peak_bytes = 0  # Measured, of the steps under this plan.
        self._bytes_after_steps = deque[int](maxlen=GROWTH_STEPS)  # Held after the steps under this plan.
        self._last_look = clock()
        self._rest_until = self._last_look
        self._available_bytes = budget.available_bytes
        self._last_fall_bytes = 0  # The last look found so much less available than the one before.

    @property
    def allowed_bytes(self) -> int:
        """What the run may reach: its budget, and where others have lowered that, the margin below the limit."""
        budget = self.plan.budget_bytes
        margin = 0 if self._device.is_separate_memory else self.budget.margin_bytes
        return max(budget, min(self._first_budget, budget + margin))

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
        self._bytes_after_steps.append(self._monitor.plan_bytes())
        if not self._device.is_separate_memory:  # The peak of such a device is that of the whole run.
            # What other phases held, such as the training of a tokenizer, says nothing of the steps.
            self._peak_bytes = max(self._peak_bytes, self._monitor.counted_phase_peaks.get("train", 0))
        now = self._clock()
        if now - self._last_look < LOOK_SECONDS:
            return False
        self._last_look = now
        needs = max(self._peak_bytes or self.plan.peak_bytes, self.budget.used())
        targets = self._targets(needs)
        target = min(targets)
        # A plan is chosen by what is held once everything is freed, however short ago that was.
        is_new = needs > target.size and target.size != self._unanswered_bytes
        is_pressed = needs > target.size or self._monitor.pressure() > PRESSURE
        if is_new or (is_pressed and now >= self._rest_until):
            self._report_cleanup(step, self.cleaner.under_pressure())
            self._monitor.sample()
            self._rest_until = self._clock() + REST_FACTOR * (self._clock() - now)
            share = self.budget.used() / self.allowed_bytes  # A smaller plan frees no RAM beside a GPU.
            if share > PRESSURE:
                in_use = say("{share} of the budget is in use, and cleanup did not help", share=f"{share:.0%}")
                target = min(target, Target(int(PRESSURE * self.allowed_bytes), "pressure", in_use))
        if needs <= target.size:
            return False
        if self._shrink(step, target):
            return True
        self._unanswered_bytes = target.size
        # A moment above its own budget is no end of a run; above a limit of the system it may be.
        is_over_limit = target.reason == "budget" and needs > target.size + target.margin
        if is_over_limit or self.budget.used() > self.allowed_bytes:
            self._give_up(target.sentence)
        return False

    def after_out_of_memory(self, error: BaseException, step: int) -> None:
        """Free the failed step and take a smaller plan; the caller runs the same rows again, or ends if `exhausted`."""
        shortage = free_failed(error, self._device)
        story = shortage.describe("train", self.plan.choice.batch_size_per_gpu, self._shape)
        size = int(self.plan.peak_bytes - LESS_AFTER_ERROR * (self.plan.peak_bytes - self.budget.used()))
        if not self._shrink(step, Target(size, "out of memory", story), shortage):
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

    def _targets(self, needs: int) -> list[Target]:
        """What the run may hold from here on, by its budget, by what others leave, and by its growth."""
        budget = self._measure()
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
        soon = self._left_soon(budget)
        if needs - DRIFT_SHARE * soon.margin > soon.size and soon.size < self.plan.budget_bytes:
            sentence = say(
                "{size} will be left ({why}), and the plan needs {planned}",
                size=format_size(soon.size),
                why=say(budget.binding),
                planned=format_size(needs),
            )
            targets.append(soon._replace(sentence=sentence))
        growth = self._growth(budget.limit(), needs)
        if growth is not None:
            targets.append(growth)
        return targets

    def _left_soon(self, budget: Budget) -> Target:
        """What others will leave in two steps, if they go on taking; at most the limit of now."""
        limit = Target(budget.limit(), "budget", "", 0 if budget.is_on_device else budget.margin_bytes)
        fall = self._available_bytes - budget.available_bytes
        # A single fall is a lowered limit, or a program that has started.
        steady_fall = max(0, min(fall, self._last_fall_bytes))
        self._available_bytes = budget.available_bytes
        self._last_fall_bytes = fall
        if budget.is_on_device:  # A smaller plan frees no RAM beside a GPU.
            return limit
        available = budget.available_bytes - STEPS_AHEAD * steady_fall
        margin = margin_of(available)
        return min(limit, Target(available - margin, "budget", "", margin))

    def _growth(self, limit: int, needs: int) -> Target | None:
        """What the run may hold so that memory that grows does not reach the limit; None: it does not grow.

        A heap that fills up to what was planned is left alone.
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
        """Go on by the fastest plan within a target, or else the next smaller one. Returns whether there is one."""
        old = self.plan
        smaller = self._smaller_plan(target)
        if smaller is None:
            return False
        # What was held until now is answered, and no reason for the next plan.
        self._peak_bytes = 0
        self._unanswered_bytes = 0
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
        lasting = max(fixed, self.budget.used())  # No plan gives this back.
        temporary = max(1, present.peak_bytes - fixed)
        ratio = max(1.0, (self._peak_bytes - lasting) / temporary)  # Measured to planned.
        relaxed = replace(  # Where nothing else fits, the user's own cut is given up.
            self._settings,
            memory_mode=AUTO,
            gradient_checkpointing=AUTO,
            batch_size_per_gpu=AUTO,
            gradient_accumulation_steps=AUTO,
        )
        limits = [target.size]
        # The margin below a limit is a second try; it is skipped where the present plan already fits with it.
        if lasting + ratio * temporary - DRIFT_SHARE * target.margin > target.size + target.margin:
            limits.append(target.size + target.margin)
        for limit in limits:
            most = min(int(fixed + (limit - lasting) / ratio), present.peak_bytes - 1)
            if most > self._largest_unfit_bytes:
                for settings in (self._settings, relaxed):
                    with suppress(DoesNotFit):
                        return self._make_plan(settings, self.budget.child(most))
                self._largest_unfit_bytes = most
        rows = present.choice.batch_size_per_gpu
        if not present.choice.saved_blocks:
            rows //= 2
        # A run that takes more than its plan said needs smaller shapes, whatever the formulas say of them.
        if rows and target.reason != "budget":
            most = max(self.budget.limit(), present.peak_bytes)
            with suppress(DoesNotFit):
                next_smaller = replace(relaxed, batch_size_per_gpu=rows, gradient_checkpointing=True)
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
