"""The memory controller keeps a run inside its budget: it looks once a step, and shrinks the run to the least target it sees.

Memory is cleaned by schedule and under pressure. Four looks may set a target for what the run holds from here on: the budget
measured again, since others take memory and limits are lowered, and what it will be after the next step if they go on; pressure that cleaning did not relieve; the run's own peak
over the budget; growth from step to step that would reach it. There is one answer, `shrink_to(target)`: the plan is made
again for that much, with the same effective batch and the same weights: more blocks recomputed, then smaller micro-batches.
What the user fixed is left as long as something else helps. After an out-of-memory error the answer is the same. Where nothing is
left to shrink, the run is to be saved and ended.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from devices.base import Device
from language import say
from memory.budget import Budget, measure_budget
from memory.cleanup import Cleaner, CleanupRecord, Shortage, free_failed
from memory.estimate.peaks import changeable
from memory.estimate.workload import ExecutionPlan
from memory.monitor import Monitor
from memory.plan import ROOMY, Plan
from memory.system_limits import free_host_bytes, margin_of
from settings.declared import Config
from settings.errors import DoesNotFit
from settings.fields import AUTO, counted
from units import MIB, format_size

PRESSURE = 0.97  # share of the budget in use from which memory is cleaned at once
REST_FACTOR = 100.0  # times what relieving took, before it is tried again: it stays under 1% of the run
LOOK_SECONDS = 1.0  # between two measurements of the budget
STEPS_AHEAD = 2  # within which another look is taken, and a smaller plan runs
DRIFT_BYTES = 8 * MIB  # of the margin below a limit: what small things of the system take of it is no smaller budget
SETTLED_STEPS = 3  # from here on the measured peak tells more than the predicted one
HEAP_BEYOND = 1.03  # times the planned peak of a step, from which an untrimmed heap may be trimmed after all
LESS_AFTER_ERROR = 0.3  # of temporary memory: so much less the next plan takes after an out-of-memory error
# Growth of what is held after a step: steps of each third of a stretch that is looked at
THIRDS = (8, 16, 32, 64)
LEAST_GROWTH = 0.002  # of the budget from third to third: less is noise
GROWTH_ERRORS = 6.0  # standard errors of the slope: by chance less than once in 100,000 looks
PLAIN_GROWTH = 0.05  # of the budget in a stretch: growth though an early peak, of loading or evaluating, hides it
FORESIGHT = 200  # steps within which the budget would be reached

# What the user fixed and what is given up, in this order, where nothing else fits.
RELAXATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"memory_mode": AUTO, "gradient_checkpointing": AUTO},
    {"batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO},
)
ADVICE = "a larger --memory_budget, a smaller --max_seq_len or a smaller --model_preset"


class Log(Protocol):
    """Where it tells what it does, as `training.report.run_log.RunLog`."""

    def event(self, name: str, sentence: str = "", /, **fields: Any) -> None: ...
    def tell(self, text: str) -> None: ...
    def memory(self, step: int, phase: str) -> None: ...
    def plan(self, plan: Plan) -> None: ...


class Target(NamedTuple):
    """What the run may hold at most from here on, in bytes, and why: in a word, and in a sentence."""

    size: float
    reason: str
    story: str
    bare: int | None = None  # the same without a margin, for a plan's own figure, where none fits otherwise


def bytes_ahead(looks: Sequence[tuple[float, int]], seconds: float) -> int:
    """What others will leave in so many seconds, if they go on taking as they did between the last three looks.

    A single fall is no pace: it may be a limit that was lowered, or a program that has started.

    Args:
        looks: time in seconds, and what others left then; oldest first.
    """
    (began, first), (middle, second), (now, last) = looks if len(looks) == 3 else [looks[-1]] * 3
    if not began < middle < now:
        return last
    pace = min((first - second) / (middle - began), (second - last) / (now - middle))
    return int(last - max(0.0, pace) * seconds)


class MemoryController:
    """Keeps one run inside its budget.

    Args:
        config: of the run; changed, it is planned with. plan: the way the run goes now.
        make_plan: (config, budget) -> the fastest plan that fits; raises DoesNotFit.
        shape: words for the longest rows, "512 + 114 tokens".
        local_processes: ranks that share this machine's memory.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        budget: Budget,
        make_plan: Callable[[Config, Budget], Plan],
        *,
        device: Device,
        monitor: Monitor,
        log: Log,
        shape: str = "",
        local_processes: int = 1,
    ) -> None:
        self.plan, self.budget = plan, budget
        self.exhausted: str | None = None  # why the run cannot go on: nothing is left to shrink
        self.first_over: int | None = None  # the step in which too much was held first, where that was answered
        self.over_bytes = 0  # the highest peak over the plan's budget that was answered
        self.cleaner = Cleaner(device)
        precision = plan.choice.precision
        base = {"lora_base": precision.lora_base} if config.lora.lora_rank else {}
        self._config = config.changed(mixed_precision=precision.mixed_precision, **base)
        self._make_plan = make_plan
        self._device, self._monitor, self._log = device, monitor, log
        self._shape, self._local_processes = shape, local_processes
        self._looked, self._rest_until, self._steps = time.monotonic(), 0.0, 0
        self._growth, self._has_cleaned_growth = Growth(), False
        self._left_by_others = deque([(self._looked, budget.available_bytes)], maxlen=3)
        self._step_began = self._looked
        self._first_plan, self._peak_ratio = plan, 1.0  # measured peak of its steps over the planned one

    @property
    def allowed_bytes(self) -> int:
        """What the run may reach at most: its budget. Where others have lowered that, the margin below the limit is there to be used."""
        lowered, first = self.plan.budget_bytes, self._first_plan.budget_bytes
        return lowered if self.budget.is_on_device else max(lowered, min(first, lowered + self.budget.margin_bytes))

    def before(self, what: str, step: int) -> None:
        """Clean before a phase that needs room, as "epoch" or "evaluation"."""
        self._cleaned(step, self.cleaner.before(what))

    def before_step(self, done: int, rows: int) -> None:
        """Clean where the next step is the first that reads rows of another epoch.

        Args:
            done: steps so far. rows: of the training data.
        """
        self._step_began = time.monotonic()
        batch = self.plan.effective_batch_size
        if done and done * batch // rows > (done - 1) * batch // rows:
            self.before("epoch", done)

    def free_bytes(self) -> int:
        """What the plan's budget leaves beside what is held now."""
        return self.plan.budget_bytes - self.budget.used()

    def after_step(self, step: int) -> bool:
        """Clean if it is time, look once, and shrink to the least target. Returns whether `plan` has changed."""
        before, record = self.plan, self.cleaner.after_step(step)
        if record is not None:
            self._cleaned(step, record)
        self._steps += 1
        peak, planned = self._step_peaks()
        if self._steps >= SETTLED_STEPS and self.plan is self._first_plan:
            self._peak_ratio = min(max(peak / planned, 0.5), 1.5)
        looks = (
            self._pressure(step, is_clean=record is not None),
            self._own_peak(step),
            self._predicted_growth(step),
            self._budget_again(),
        )
        if targets := [target for target in looks if target is not None]:
            self.shrink_to(step, min(targets, key=lambda target: target.size))
        is_budget_near = peak > max(HEAP_BEYOND * planned, ROOMY * self.plan.budget_bytes)
        if is_budget_near and self.plan.choice.malloc == "untrimmed":
            self.plan = replace(self.plan, choice=replace(self.plan.choice, malloc="fast"))
            told = "steps take {peak}, {planned} were planned, and the budget of {budget} is near: freed memory is returned to the system within each step from here on"
            budget = format_size(self.plan.budget_bytes)
            self._log.tell(say(told, peak=format_size(peak), planned=format_size(planned), budget=budget))
        return self.plan is not before

    def after_out_of_memory(self, error: BaseException, step: int) -> None:
        """Free the failed step and take a smaller plan; the caller runs the same rows again, or ends if `exhausted`."""
        shortage = free_failed(error, self._device)
        story = shortage.describe("train", self.plan.choice.batch_size_per_gpu, self._shape)
        size = self.plan.peak_bytes - LESS_AFTER_ERROR * changeable(self.plan.components)
        self.shrink_to(step, Target(size, "out of memory", story), shortage)

    def after_evaluation_out_of_memory(self, error: BaseException, batch_size: int, step: int) -> int:
        """Free the failed evaluation and halve its micro-batch. Returns it; the run is `exhausted` where it was one row."""
        shortage = free_failed(error, self._device)
        smaller, story = batch_size // 2, shortage.describe("evaluation", batch_size, self._shape)
        if smaller == 0:
            told = "{story}; a single row does not fit. What helps most: {advice}"
            self.exhausted = say(told, story=story, advice=say(ADVICE))
            return batch_size
        told = "{story}; evaluating the same rows again with micro-batch {micro}"
        report = say(told, story=story, micro=smaller)
        self._recovered(step, "evaluation", "out of memory", report, batch_size, smaller, None, shortage)
        self.plan = replace(self.plan, choice=replace(self.plan.choice, eval_batch_size_per_gpu=smaller))
        return smaller

    # --- the four looks: what the run may hold from here on, or None ---

    def _pressure(self, step: int, is_clean: bool) -> Target | None:
        if is_clean or self._monitor.pressure() <= PRESSURE or time.monotonic() < self._rest_until:
            return None
        began = time.monotonic()
        self._cleaned(step, self.cleaner.under_pressure())
        pressure = self._monitor.plan_pressure()  # a smaller plan frees no RAM beside a GPU
        self._rest_until = time.monotonic() + REST_FACTOR * (time.monotonic() - began)
        if pressure <= PRESSURE:
            return None
        story = say("{share} of the budget is in use, and cleanup did not help", share=f"{pressure:.0%}")
        return Target(self.plan.peak_bytes * PRESSURE / max(pressure, 1.0), "pressure", story)

    def _own_peak(self, step: int) -> Target | None:
        peak, most = self._monitor.counted_peak_bytes, self.plan.budget_bytes
        if self._device.is_separate_memory or peak <= most or self._monitor.counted_phase != "train":
            return None
        self._count_anew(step)
        told = "the peak of {peak} exceeded the budget of {budget}"
        story = say(told, peak=format_size(peak), budget=format_size(most))
        return Target(self.plan.peak_bytes * most / peak, "peak", story)

    def _predicted_growth(self, step: int) -> Target | None:
        """Growth beyond the plan is first answered by cleaning; where memory grows again after that, by a smaller plan."""
        limit = self.budget.limit() if self._device.is_separate_memory else self._monitor.budget_bytes
        held, planned = self._step_peaks()
        peak = held / max(1, limit)  # in shares of the budget, as growth is
        growth = self._growth.after_step(self._monitor.plan_pressure(), peak)
        steps_left = max(0.0, 1.0 - peak) / growth if growth else math.inf
        if steps_left > FORESIGHT or held <= planned:  # a heap that fills up to what was planned does not grow
            return None
        pace = format_size(int(growth * limit))
        told = "memory grows by {pace} per step and would reach the budget in {steps}"
        self._log.tell(say(told, pace=pace, steps=counted(int(steps_left), "step")))
        self._growth = Growth()  # observed anew, after what is done now
        if self._has_cleaned_growth:
            size = self.plan.peak_bytes / (1.0 + FORESIGHT * growth)
            return Target(size, "growth", say("memory still grows after cleanup"))
        self._has_cleaned_growth = True
        self._cleaned(step, self.cleaner.under_pressure())
        return None

    def _budget_again(self) -> Target | None:
        now = time.monotonic()
        step_seconds = now - self._step_began  # without an evaluation before it, where it is told that it begins
        self._step_began = now
        if now - self._looked < LOOK_SECONDS:
            return None
        self._looked = now
        budget = measure_budget(self._config.memory.memory_budget, self._device, self._local_processes)
        limit, expected = budget.limit(), int(self.plan.peak_bytes * self._peak_ratio)
        if limit < self.budget.limit():
            self.budget = budget
            self._monitor.watch(max(budget.host_bytes, 1), from_now=True)
        least = min(self.plan.budget_bytes, expected) - min(DRIFT_BYTES, budget.margin_bytes)
        self._left_by_others.append((now, budget.available_bytes))
        ahead = bare = limit
        if not budget.is_on_device:  # a smaller plan frees no RAM beside a GPU
            left = max(0, bytes_ahead(self._left_by_others, STEPS_AHEAD * max(step_seconds, LOOK_SECONDS)))
            ahead = min(limit, left - margin_of(left))
            bare = min(limit, left)
        if ahead >= least:
            return None
        planned = format_size(expected)
        if limit < least:
            story = say(
                "the budget is now {size} ({why}); the plan assumed {planned}",
                size=format_size(self.budget.limit()), why=self.budget.binding, planned=planned,
            )  # fmt: skip
        else:
            told = "others take more and more memory: {size} will be left within {steps}, and the plan needs {planned}"
            steps = counted(STEPS_AHEAD, "step")
            story = say(told, size=format_size(ahead), steps=steps, planned=planned)
        # one step more, and the time to save: what the margin does not bridge is as good as gone
        reason = "budget" if bare < least else "others"
        return Target(ahead / self._peak_ratio, reason, story, bare)

    # --- the one answer ---

    def shrink_to(self, step: int, target: Target, shortage: Shortage | None = None) -> None:
        """Go on by the fastest plan within the target; where it would run no smaller shapes, or there is none, by the next smaller."""
        old, is_measured = self.plan, target.reason not in ("budget", "others")
        smaller = self._smaller(target.size, is_measured)
        if smaller is None and target.bare is not None:
            smaller = self._smaller(target.bare, is_measured)
        if smaller is None:
            # inside the budget a run may be tight, and above it a moment is no end
            over = target.reason not in ("pressure", "growth", "peak", "others") or self._monitor.plan_pressure() > 1.0
            self.exhausted = None
            if over:
                self.exhausted = say(
                    "{story}; nothing more can be reduced. What helps most: {advice}",
                    story=target.story,
                    advice=say(ADVICE),
                )
            return
        rows, times = smaller.choice.batch_size_per_gpu, smaller.choice.gradient_accumulation_steps
        report = say(
            "{story}; continuing with micro-batch {micro} x accumulation {times}, {recomputed}, effective batch unchanged",
            story=target.story, micro=rows, times=times, recomputed=smaller.recomputed(),
        )  # fmt: skip
        self._count_anew(step)
        self.plan = replace(smaller, budget_bytes=min(self.budget.limit(), old.budget_bytes))
        self._recovered(step, "train", target.reason, report, old.choice.batch_size_per_gpu, rows, times, shortage)
        self._log.plan(self.plan)

    def _smaller(self, size: float, is_measured: bool) -> Plan | None:
        """The fastest plan within `size` whose peak is below the present one; None: there is none.

        Args:
            is_measured: the run held more than its plan said. Then a plan is trusted only where it runs smaller shapes, and if none
                does, all blocks are recomputed, or else the micro-batch is halved, whatever peak the formulas give.
        """
        configs = list(accumulate(RELAXATIONS, lambda config, fields: config.changed(**fields), initial=self._config))
        limit = min(int(size), self.plan.peak_bytes - 1)
        plans = (self._planned(config, limit) for config in configs[1:])
        plan, present = next((plan for plan in plans if plan is not None), None), self.plan.choice
        if not is_measured or (plan is not None and _runs_smaller(plan.choice, present)):
            return plan
        rows = present.batch_size_per_gpu if present.saved_blocks else present.batch_size_per_gpu // 2
        if rows == 0:
            return None
        config = configs[-1].changed(batch_size_per_gpu=rows, gradient_checkpointing=True)
        return self._planned(config, max(self.budget.limit(), self.plan.peak_bytes))

    def _planned(self, config: Config, most: int) -> Plan | None:
        with suppress(DoesNotFit):
            return self._make_plan(config, self.budget.child(most))
        return None

    def _cleaned(self, step: int, record: CleanupRecord) -> None:
        self._log.event("cleanup", step=step, kind=record.kind, freed_bytes=record.freed_bytes, reason=record.reason)
        if record.kind == "full" and record.reason in ("schedule", "pressure"):
            self._log.memory(step, "train")

    def _recovered(
        self, step: int, phase: str, reason: str, report: str, before: int, now: int, times: int | None, shortage: Shortage | None
    ) -> None:  # fmt: skip
        """Report a smaller plan: rows of a micro-batch before and now, and micro-batches of a step."""
        self._log.event(
            "recovery", report, step=step, phase=phase, reason=reason, old_batch_size=before, batch_size=now,
            gradient_accumulation_steps=times, needed_bytes=shortage.needed_bytes if shortage else None,
            free_bytes=shortage.free_bytes if shortage else free_host_bytes(), report=report,
        )  # fmt: skip

    def _count_anew(self, step: int) -> None:
        """What was held under another plan is answered: it is no reason for the next one."""
        if self._device.is_separate_memory:  # whose peak is of the whole run
            return
        peak = self._monitor.counted_peak_bytes
        if peak > self.plan.budget_bytes:
            self.over_bytes = max(self.over_bytes, peak)
        if peak > self.allowed_bytes and self.first_over is None:
            self.first_over = step
        self._monitor.watch(self._monitor.budget_bytes, from_now=True)

    def _step_peaks(self) -> tuple[int, int]:
        """The most that steps have held so far, and what was planned for them; a device tells the peak of all phases alone."""
        if self._device.is_separate_memory:
            return self._device.memory_peak_bytes(), self.plan.peak_bytes
        return self._monitor.phase_peaks.get("train", 0), self.plan.step_peak_bytes


def _runs_smaller(new: ExecutionPlan, old: ExecutionPlan) -> bool:
    """Whether a plan is sure to hold less at a time, or no longer keeps freed memory."""
    rows, old_rows = new.batch_size_per_gpu, old.batch_size_per_gpu
    return (
        rows < old_rows
        or rows * new.micro_batches_per_pass < old_rows * old.micro_batches_per_pass
        or new.saved_blocks < old.saved_blocks
        or (old.malloc == "untrimmed" and new.malloc != "untrimmed")
    )


class Growth:
    """Whether what a run holds after its steps grows, in shares of the budget.

    A line is laid through stretches of several lengths: steep growth shows in a short one, slow growth within noise in a longer one.
    Its slope must be more than scatter explains, the least of each third of the stretch higher than that of the third before (one
    step up is no growth), and the run's peak risen with it.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=3 * THIRDS[-1])
        self._steps = 0

    def after_step(self, held: float, peak: float) -> float:
        """Growth a step, where a stretch that has just ended shows it; else 0.

        Args:
            held, peak: now, and the most so far.
        """
        self._seen.append((held, peak))
        self._steps += 1
        return 0.0 if self._steps % THIRDS[0] else max(self._growth_over(third) for third in THIRDS)

    def _growth_over(self, third: int) -> float:
        if len(self._seen) < 3 * third:
            return 0.0
        held, peaks = np.array(self._seen)[-3 * third :].T
        steps = np.arange(3 * third)
        slope, level = np.polyfit(steps, held, 1)
        error = float(np.std(held - level - slope * steps)) / (float(steps.std()) * (3 * third) ** 0.5)
        rise, least = slope * third, held.reshape(3, third).min(1)
        if rise <= LEAST_GROWTH or slope <= GROWTH_ERRORS * error or 2 * np.diff(least).min() < rise:
            return 0.0
        return float(slope) if 2 * rise > PLAIN_GROWTH or peaks[-1] - peaks[0] > rise else 0.0
