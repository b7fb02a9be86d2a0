"""One optimizer step: gradients of all micro-batches, then loss and norm in one synchronisation, then the update.

Where the plan does not hold the gradients, blocks are updated in the midst of backward (`engine.optimizer_in_backward`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from data.batches.collate import Batch
from devices.base import Device, placed_together
from devices.malloc import HeapTrimmer
from devices.threads import follow_machine
from engine.all_reduce import StepFailed
from engine.blockwise import Blockwise, Schedule
from engine.micro_batches import to_micro_batch
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import Step
from memory.cleanup import drop_frames
from memory.estimate.workload import ExecutionPlan
from model.micro_batch import MicroBatch


class Engine:
    """Everything that the steps of one model need.

    Args:
        blockwise: forms the gradients. update: applies them. device: where all of it lies. plan: how steps are run.
        sum_over: sums each of some numbers over the processes that train together; by default there is one.
    """

    def __init__(
        self,
        blockwise: Blockwise,
        update: OptimizerInBackward,
        device: Device,
        plan: ExecutionPlan,
        sum_over: Callable[..., list[float]] = lambda *numbers: list(numbers),
    ) -> None:
        self.model = blockwise.model
        self.blockwise = blockwise
        self.update = update
        self.device = device
        self._sum_over = sum_over
        self.waited_seconds = 0.0  # Of the last step, for weights that are stored elsewhere.
        self.apply_plan(plan)

    def step(self, step: Step, batches: Sequence[Batch], total_labels: int) -> Outcome:
        """One optimizer step, with the same outcome on all processes. One that is not done leaves no gradients.

        Args:
            batches: the micro-batches of this process.
            total_labels: labels of the whole effective batch.
        Raises:
            UserError: fp16 overflows whatever the loss scale is. Exception: whatever is not for lack of memory.
        Memory: that of one accumulation pass.
        """
        waited = self.blockwise.weight_store.waited_seconds()
        error: Exception | None = None
        loss = 0.0
        norm = 0.0
        try:
            loss, norm = self.attempt(step, batches, total_labels)
        except StepFailed:
            pass  # The process that has failed says so in the sum below.
        except Exception as raised:
            if not self.device.is_out_of_memory(raised):
                raise
            error = raised
            drop_frames(error)
            if self.update.reducer is not None:
                self.update.reducer.abort(Schedule(self.model).backward(), self.blockwise.zero_gradients)
        self.waited_seconds = self.blockwise.weight_store.waited_seconds() - waited
        loss, failures, changes = self._sum_over(loss, float(error is not None), float(self.update.has_changed_weights))
        if failures:
            self.model.zero_grad()
            return OutOfMemory(changes > 0, error)
        if not math.isfinite(loss) or (self.update.scaling is None and not math.isfinite(norm)):
            return NotFinite(changes > 0)
        if self.update.scaling is not None:
            self.update.scaling.count(math.isfinite(norm))
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
                micro_batches = [self.micro_batch(batch) for batch in batches[first : first + pass_size]]
                loss += self.blockwise.gradients(micro_batches, total_labels, self.update, is_last)
        return self.update.finish(loss)

    def micro_batch(self, batch: Batch) -> MicroBatch:
        """A batch on the device, filled up to the sizes of the plan."""
        return to_micro_batch(batch, self.model.config, self.device.torch_device, self.plan.sizes)

    def apply_plan(self, plan: ExecutionPlan) -> None:
        """Save blocks, chunk the loss and trim the heap as a plan says, from the next step on; dtypes stay."""
        self.plan = plan
        self.blockwise.saved_blocks = plan.saved_blocks
        self.blockwise.loss_settings = replace(self.blockwise.loss_settings, chunk_bytes=plan.loss_chunk_bytes)
        self.blockwise.heap = HeapTrimmer("small" if self.device.is_separate_memory else plan.malloc)

    def close(self) -> None:
        """Give back what is held outside of memory; no step can be made afterwards."""
        self.blockwise.weight_store.close()


@dataclass(frozen=True)
class Done:
    """The step counts. Where the norm of fp16's gradients is not finite, they have overflowed and no weight was updated."""

    loss: float  # Summed over all labels of the effective batch.
    norm: float  # Of all gradients, before they are clipped.


@dataclass(frozen=True)
class OutOfMemory:
    """Memory did not suffice on some process. Where any has changed weights, the step cannot be run again."""

    has_changed_weights: bool
    error: Exception | None  # None: it was another process's.


@dataclass(frozen=True)
class NotFinite:
    """The loss or a gradient is inf or nan, and any process may have changed weights by it."""

    has_changed_weights: bool


Outcome = Done | OutOfMemory | NotFinite
