"""How does a run stay inside its budget to the end? It cleans, measures again, and takes a smaller way to run.

By schedule and under pressure memory is cleaned. The budget is measured again as the run continues, since others take
memory and limits are lowered. Where the plan no longer fits, or an out-of-memory error came, the plan is made again for
what there is, with the same effective batch and the same weights: more blocks recomputed, then smaller micro-batches. What
the user fixed is left as long as something else helps. Where nothing is left, the run is to be saved and ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from config import Config
from devices.base import Device
from language import say
from memory.cleanup import Cleaner, CleanupRecord
from memory.estimate.workload import ExecutionPlan
from memory.observe.budget import Budget, free_host_bytes, measure_budget
from memory.observe.growth import FORESIGHT, Growth
from memory.observe.monitor import Monitor
from memory.plan import Plan
from memory.recovery import Shortage, free_failed
from settings.errors import DoesNotFit
from settings.fields import AUTO, counted
from training.report.run_log import RunLog
from training.report.summary import recomputed
from units import MIB, format_size

PRESSURE = 0.97  # share of the budget in use from which memory is cleaned at once
LOOK_SECONDS = 1.0  # between two measurements of the budget
FIXED = ("base", "weights", "optimizer state")  # parts of a plan that no way to run can change
SHARE_AFTER_ERROR = 0.7  # of the failed way's changeable part: what the next way may take at most
DRIFT_BYTES = 8 * MIB  # of the margin below a limit: what small things of the system take of it is no smaller budget
REST_FACTOR = 100.0  # times what relieving took, before it is tried again: it stays under 1% of the run
HEAP_BEYOND = 1.03  # times the planned peak, from which an untrimmed heap is trimmed after all
SETTLED_STEPS = 3  # from here on the measured peak tells more than the predicted one

# What the user fixed and what is given up, in this order, where nothing else fits.
RELAXATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"memory_mode": AUTO, "gradient_checkpointing": AUTO},
    {"batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO},
)
NOTHING_LEFT = "{story}; nothing is left to shrink. What helps most: {advice}"
ADVICE = "a larger --memory_budget, a smaller --max_seq_len or a smaller --model_preset"


class Keeper:
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
        log: RunLog,
        shape: str = "",
        local_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.budget = plan, budget
        self.exhausted: str | None = None  # why the run cannot go on: nothing is left to shrink
        self.cleaner = Cleaner(device, config.memory.light_clean_steps, config.memory.full_clean_steps)
        precision = plan.choice.precision
        base = {"lora_base": precision.lora_base} if config.lora.lora_rank else {}
        self._config = config.changed(
            mixed_precision=precision.mixed_precision, shard_weights=plan.choice.shards > 1, **base
        )
        self._make_plan = make_plan
        self._device, self._monitor, self._log = device, monitor, log
        self._shape, self._local_processes, self._clock = shape, local_processes, clock
        self._looked, self._rest_until, self._steps = clock(), 0.0, 0
        self._growth, self._has_cleaned_growth = Growth(), False
        self._first_plan, self._ratio = plan, 1.0  # measured peak over predicted, of the first plan
        self.first_over: int | None = None  # the step in which the budget was first exceeded, where that was answered

    def before(self, what: str, step: int) -> None:
        """Clean before a phase that needs room: "epoch" or "evaluation"."""
        self._cleaned(step, self.cleaner.before(what))

    def _cleaned(self, step: int, record: CleanupRecord) -> None:
        self._log.event("cleanup", step=step, kind=record.kind, freed_bytes=record.freed_bytes, reason=record.reason)
        if record.kind == "full" and record.reason in ("schedule", "pressure"):
            self._log.memory(step, "train")

    def free_bytes(self) -> int:
        """What the budget leaves beside what is held now: of the memory that it is about."""
        now = self._monitor.sample()
        is_separate = self._device.is_separate_memory
        held = now.device_bytes - self._device.memory_idle_bytes() if is_separate else now.anon_bytes + now.device_bytes
        return self.plan.budget_bytes - held

    def before_step(self, done: int, rows: int) -> None:
        """Clean where the next step is the first that reads rows of another epoch.

        Args:
            done: steps so far. rows: of the training data.
        """
        batch = self.plan.effective_batch_size
        if done and done * batch // rows > (done - 1) * batch // rows:
            self.before("epoch", done)

    def after_step(self, step: int) -> bool:
        """Clean if it is time or needed, and look at what is held. Returns whether `plan` has changed."""
        self._steps += 1
        before = self.plan
        if self._steps >= SETTLED_STEPS and self.plan is self._first_plan:
            separate = self._device.is_separate_memory
            measured = self._device.memory_peak_bytes() if separate else self._monitor.peak_bytes
            self._ratio = min(max(measured / self.plan.peak_bytes, 0.5), 1.5)
        record = self.cleaner.after_step(step)
        if record is not None:
            self._cleaned(step, record)
        for reason, story, target_bytes in self._excesses(step, is_clean=record is not None):
            self._shrink(step, reason, story, target_bytes)
        return self.plan is not before

    def after_out_of_memory(self, error: BaseException, step: int) -> None:
        """Free the failed step and take a smaller way; the caller runs the same rows again, or ends if `exhausted`."""
        shortage = free_failed(error, self._device)
        fixed = sum(size for name, size in self.plan.components.items() if name in FIXED)
        story = shortage.describe("train", self.plan.choice.batch_size_per_gpu, self._shape)
        target_bytes = fixed + SHARE_AFTER_ERROR * (self.plan.peak_bytes - fixed)
        self._shrink(step, "out of memory", story, target_bytes, shortage)

    def after_evaluation_out_of_memory(self, error: BaseException, batch_size: int, step: int) -> int:
        """Free the failed evaluation and halve its micro-batch. Returns it; the run is `exhausted` where it was one row."""
        shortage = free_failed(error, self._device)
        smaller, story = batch_size // 2, shortage.describe("evaluation", batch_size, self._shape)
        if smaller == 0:
            told = "{story}; a single row does not fit. What helps most: {advice}"
            self.exhausted = say(told, story=story, advice=say(ADVICE))
            return batch_size
        told = "{story}; continuing with micro-batch {micro}; the same rows are evaluated again"
        report = say(told, story=story, micro=smaller)
        self._recovered(step, "evaluation", "out of memory", report, batch_size, smaller, None, shortage)
        self.plan = replace(self.plan, choice=replace(self.plan.choice, eval_batch_size_per_gpu=smaller))
        return smaller

    # --- a smaller way ---

    def _excesses(self, step: int, is_clean: bool) -> Iterator[tuple[str, str, float]]:
        """Why the run is to hold less from here on: the reason, its story, and what a plan may hold at most.

        Args:
            is_clean: whether memory was cleaned after this step.
        """
        monitor, separate, pressure = self._monitor, self._device.is_separate_memory, self._monitor.pressure()
        if not is_clean and pressure > PRESSURE and self._clock() >= self._rest_until:
            began = self._clock()
            self._cleaned(step, self.cleaner.under_pressure())
            if (pressure := monitor.pressure()) > PRESSURE:
                story = say("{share} of the budget is in use and cleaning did not help", share=f"{pressure:.0%}")
                yield "pressure", story, self.plan.peak_bytes * PRESSURE / max(pressure, 1.0)
            self._rest_until = self._clock() + REST_FACTOR * (self._clock() - began)
        peak, most = monitor.counted_peak_bytes, self.plan.budget_bytes
        if not separate and peak > most and monitor.counted_phase == "train":  # whatever the plan said
            told = "the peak of {peak} was over the budget of {budget}"
            story = say(told, peak=format_size(peak), budget=format_size(most))
            yield "peak", story, self.plan.peak_bytes * most / peak
            self._count_anew(step)
        if separate:
            share = self._device.memory_peak_bytes() / max(1, self._room(self.budget))
        else:
            share = monitor.peak_bytes / monitor.budget_bytes
        growth = self._growth.after_step(monitor.pressure(), share)
        left = self._growth.steps_left(growth, share)
        if left is not None:  # it is cleaned once, then the run is made smaller
            pace = format_size(int(growth * monitor.budget_bytes))
            told = "memory grows by {pace} a step and would reach the budget in {steps}"
            self._log.tell(say(told, pace=pace, steps=counted(left, "step")))
            self._growth.forget()
            if self._has_cleaned_growth:
                story = say("memory still grows after cleaning")
                yield "growth", story, self.plan.peak_bytes / (1.0 + FORESIGHT * growth)
            else:
                self._has_cleaned_growth = True
                self._cleaned(step, self.cleaner.under_pressure())
        peak = monitor.phase_peaks.get("train", 0)
        if self.plan.choice.malloc == "untrimmed" and peak > HEAP_BEYOND * self.plan.peak_bytes:
            self.plan = replace(self.plan, choice=replace(self.plan.choice, malloc="fast"))
            self._log.tell(say("memory is above the plan: what malloc holds is given back in each step from here on"))
        if self._clock() - self._looked < LOOK_SECONDS:
            return
        self._looked = self._clock()
        now = measure_budget(self._config.memory.memory_budget, self._device, self._local_processes)
        room, expected = self._room(now), int(self.plan.peak_bytes * self._ratio)
        if room < self._room(self.budget):
            self.budget = now
            monitor.watch(max(now.host_bytes, 1), from_now=True)
        if room + min(DRIFT_BYTES, now.margin_bytes) < min(self.plan.budget_bytes, expected):
            story = say(
                "the budget is now {size} ({why}), planned was {planned}",
                size=format_size(self._room(self.budget)), why=self.budget.binding, planned=format_size(expected),
            )  # fmt: skip
            yield "budget", story, room / self._ratio

    def _shrink(
        self, step: int, reason: str, story: str, target_bytes: float, shortage: Shortage | None = None
    ) -> None:
        """Go on by the fastest plan within `target_bytes`; where it would run no other shapes, or there is none, by the next smaller."""
        old, smaller = self.plan, self._smaller(target_bytes, is_measured=reason != "budget")
        if smaller is None:
            # inside the budget a run may be tight, and above it a moment is no end
            over = reason not in ("pressure", "growth", "peak") or self._monitor.pressure() > 1.0
            self.exhausted = say(NOTHING_LEFT, story=story, advice=say(ADVICE)) if over else None
            return
        choice = smaller.choice
        rows, times = choice.batch_size_per_gpu, choice.gradient_accumulation_steps
        report = say(
            "{story}; continuing with micro-batch {micro} x accumulation {times}, {recomputed}, effective batch unchanged",
            story=story, micro=rows, times=times, recomputed=recomputed(choice.saved_blocks, old.num_blocks),
        )  # fmt: skip
        self._count_anew(step)
        self.plan = replace(smaller, budget_bytes=min(self._room(self.budget), old.budget_bytes))
        self._recovered(step, "train", reason, report, old.choice.batch_size_per_gpu, rows, times, shortage)
        self._log.plan(self.plan)

    def _recovered(
        self, step: int, phase: str, reason: str, report: str, before: int, now: int, times: int | None, shortage: Shortage | None
    ) -> None:  # fmt: skip
        """Report a smaller way: rows of a micro-batch before and now, and micro-batches of a step."""
        self._log.event(
            "recovery", report, step=step, phase=phase, reason=reason, old_batch_size=before, batch_size=now,
            gradient_accumulation_steps=times, needed_bytes=shortage.needed_bytes if shortage else None,
            free_bytes=shortage.free_bytes if shortage else free_host_bytes(), report=report,
        )  # fmt: skip

    def _count_anew(self, step: int) -> None:
        """What was held in another way is answered: it is no reason for the next one."""
        monitor = self._monitor
        if self.first_over is None and monitor.counted_peak_bytes > self.plan.budget_bytes:
            self.first_over = step
        monitor.watch(monitor.budget_bytes, from_now=True)

    def _smaller(self, target_bytes: float, is_measured: bool) -> Plan | None:
        """The fastest plan within `target_bytes` and below the present one.

        Where more was measured than was planned, whatever the formulas say of it: one that runs smaller shapes, else with all blocks
        recomputed, or half the micro-batch; None where both are at their end.
        """
        config, choice, target = self._config, self.plan.choice, min(int(target_bytes), self.plan.peak_bytes - 1)
        found: Plan | None = None
        for relaxation in RELAXATIONS:
            config = config.changed(**relaxation)
            found = found or self._fitting(config, target)
        if not is_measured or (found is not None and _runs_smaller(found.choice, choice)):
            return found
        rows = choice.batch_size_per_gpu if choice.saved_blocks else choice.batch_size_per_gpu // 2
        if rows == 0:
            return None
        config = config.changed(batch_size_per_gpu=rows, gradient_checkpointing=True)
        return self._fitting(config, max(self._room(self.budget), self.plan.peak_bytes))

    def _fitting(self, config: Config, room_bytes: int) -> Plan | None:
        budget = replace(self.budget, host_bytes=room_bytes)
        if self._device.is_separate_memory:
            budget = replace(self.budget, device_bytes=room_bytes)
        with suppress(DoesNotFit):
            return self._make_plan(config, budget)
        return None

    def _room(self, budget: Budget) -> int:
        separate = self._device.is_separate_memory and budget.device_bytes is not None
        return int(budget.device_bytes or 0) if separate else budget.host_bytes


def _runs_smaller(choice: ExecutionPlan, than: ExecutionPlan) -> bool:
    """Whether the walk itself holds less, not only what surrounds it: rows of a micro-batch, or of all that pass together."""
    rows, old_rows = (
        (way.batch_size_per_gpu, way.batch_size_per_gpu * way.micro_batches_per_pass) for way in (choice, than)
    )
    trims = than.malloc == "untrimmed" != choice.malloc
    return choice.saved_blocks < than.saved_blocks or rows[0] < old_rows[0] or rows[1] < old_rows[1] or trims
