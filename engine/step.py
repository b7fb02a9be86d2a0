"""One optimizer step: gradients of all micro-batches, some applied in backward; loss and norm in one synchronisation;
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from data.batches.collate import Batch
from devices.base import Device, form_scores, placed_together
from devices.malloc import HeapTrimmer
from devices.threads import follow_machine
from engine.all_reduce import StepFailed
from engine.blockwise import Blockwise, Schedule
from engine.micro_batches import to_micro_batch
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import Step
from memory.cleanup import drop_frames
from memory.estimate.workload import ExecutionPlan


@dataclass(eq=False)
class Engine:
    """Everything that the steps of one model need.

    Args:
        sum_over: sums each of some numbers over all processes.
        before_wait: called in each step before the host waits for the device, for work that may be done meanwhile.
    """

    blockwise: Blockwise
    update: OptimizerInBackward
    device: Device
    plan: ExecutionPlan
    sum_over: Callable[..., list[float]] = lambda *numbers: list(numbers)
    before_wait: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.model = self.blockwise.model
        self.apply_plan(self.plan)

    def step(self, step: Step, batches: Sequence[Batch], total_labels: int) -> Done | OutOfMemory | NotFinite:
        """One optimizer step: the micro-batches of this process, out of `total_labels` labels over all processes.

        The outcome is the same on all processes. A step that is not done leaves no gradients.
        Raises UserError where fp16 overflows whatever the loss scale is, and any error that is not for lack of memory.
        """
        error: Exception | None = None
        loss = norm = 0.0
        try:
            loss, norm = self.attempt(step, batches, total_labels)
        except StepFailed:
            pass  # The process that has failed says so in the sum below.
        except Exception as raised:
            if not self.device.is_out_of_memory(raised):
                raise
            error = raised
            drop_frames(error)
            self.update.abort(Schedule(self.model).backward(), self.blockwise.zero_gradients)
        loss, failures, changes = self.sum_over(loss, float(error is not None), float(self.update.has_changed_weights))
        if failures:
            self.model.zero_grad()
            return OutOfMemory(changes > 0, error)
        scaling = self.update.scaling
        if not math.isfinite(loss) or (scaling is None and not math.isfinite(norm)):
            return NotFinite(changes > 0)
        if scaling is not None:
            scaling.count(math.isfinite(norm))
        return Done(loss, norm)

    def attempt(self, step: Step, batches: Sequence[Batch], total_labels: int) -> tuple[float, float]:
        """Gradients and update of a step; returns the summed loss of this process and the norm of all gradients."""
        follow_machine()
        self.blockwise.objective.clear()
        self.update.begin(step)
        loss = torch.zeros((), device=self.model.embedding.device)
        pass_size = len(batches) if self.plan.accumulation_passes == 1 else self.plan.micro_batches_per_pass
        for first in range(0, len(batches), max(1, pass_size)):
            is_last = first + pass_size >= len(batches)
            with placed_together():  # One copy to the device for all indices of a pass.
                if is_last:
                    self.update.optimizer.place_keys(self.update.step)
                micro_batches = [
                    to_micro_batch(batch, self.model.config, self.device.torch_device, self.plan.sizes)
                    for batch in batches[first : first + pass_size]
                ]
                loss += self.blockwise.gradients(micro_batches, total_labels, self.update, is_last)
        self.before_wait()
        return self.update.finish(loss)

    def apply_plan(self, plan: ExecutionPlan) -> None:
        """Save blocks, form scores, chunk the loss, hold gradients and trim the heap as a plan says, from the next step
        on; dtypes stay.
        """
        self.plan = plan
        form_scores(plan.scores)
        self.update.holds_gradients = self.update.needs_norm or plan.hold_gradients
        self.blockwise.saved_blocks = plan.saved_blocks
        self.blockwise.loss_settings = replace(self.blockwise.loss_settings, chunk_bytes=plan.loss_chunk_bytes)
        self.blockwise.heap = HeapTrimmer("small" if self.device.is_separate_memory else plan.malloc)


class Done(NamedTuple):
    """The step counts. Where the norm of fp16's gradients is not finite, they have overflowed and no weight was
    updated.
    """

    loss: float  # Summed over all labels of the effective batch.
    norm: float  # The norm of all gradients before they are clipped.


class OutOfMemory(NamedTuple):
    """Memory did not suffice on some process. Where any has changed weights, the step cannot be run again."""

    has_changed_weights: bool
    error: Exception | None  # None: it was another process's.


class NotFinite(NamedTuple):
    """The loss or a gradient is inf or nan, and any process may have changed weights by it."""

    has_changed_weights: bool
