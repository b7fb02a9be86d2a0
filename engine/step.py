"""One optimizer step: accumulate, apply, recover.

accumulate: the gradients of all micro-batches, in one pass over the model or in several
apply:      each group of weights once its gradients are complete and summed over the processes; or all at the end
recover:    a step for which memory does not suffice, or whose numbers are not finite, is freed again; the other processes
            stop at the same point; all know afterwards what has happened, and whether weights were changed by it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from data.batches.collate import Batch
from devices.base import Device, placed_together
from devices.malloc import HeapTrimmer
from devices.threads import follow_machine
from engine.all_reduce import StepFailed
from engine.blockwise import Blockwise, Schedule
from engine.micro_batches import to_micro_batch
from engine.optimizer_in_backward import Lost, NotFinite, OptimizerInBackward
from engine.optimizers import Optimizer, Step
from memory.cleanup import drop_frames
from memory.estimate.workload import ExecutionPlan
from model.micro_batch import MicroBatch
from model.t5 import T5


@dataclass(frozen=True)
class Outcome:
    """What a step came to, the same on all processes but for `failure`.

    Args:
        loss: summed over all labels of the effective batch.
        is_out_of_memory: memory did not suffice, on any process. failure: the error, where it came here.
        is_finite: loss and gradients were, on all processes.
        is_changed: whether any process has changed weights: then a step that failed cannot be run again.
        is_late: whether it was the step before that was not finite: a GPU is asked in the next one.
    """

    loss: float
    is_out_of_memory: bool
    is_finite: bool
    is_changed: bool
    failure: Exception | None = None
    is_late: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_finite and not self.is_out_of_memory


class Engine:
    """Everything that the steps of one model need.

    Args:
        blockwise: forms the gradients. update: applies them; it holds the optimizer. device: where all of it lies.
        choice: the plan's.
        sum_over: sums each of some numbers over the processes that train together; None: there is one.
    """

    def __init__(
        self,
        blockwise: Blockwise,
        update: OptimizerInBackward,
        device: Device,
        choice: ExecutionPlan,
        sum_over: Callable[..., list[float]] | None = None,
    ) -> None:
        self.blockwise, self.update, self.device = blockwise, update, device
        self._sum_over = sum_over or (lambda *numbers: list(numbers))
        self.waited_seconds = 0.0  # in the last step, for weights that are stored elsewhere
        self.apply_plan(choice)

    @property
    def model(self) -> T5:
        return self.blockwise.model

    @property
    def optimizer(self) -> Optimizer:
        return self.update.optimizer

    @property
    def loss_scaling(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of the loss scale; None without fp16."""
        return self.update.scaling_state()

    def micro_batch(self, batch: Batch) -> MicroBatch:
        """A batch on the device, filled up to the sizes that the plan has chosen."""
        return to_micro_batch(batch, self.model.config, self.device.torch_device, self.choice.sizes)

    def apply_plan(self, choice: ExecutionPlan) -> None:
        """Save blocks, chunk the loss and trim the heap as a plan says, from the next step on; dtypes stay."""
        self.choice = choice
        blockwise = self.blockwise
        blockwise.saved_blocks = choice.saved_blocks
        blockwise.loss_settings = replace(blockwise.loss_settings, chunk_bytes=choice.loss_chunk_bytes)
        blockwise.heap = HeapTrimmer("small" if self.device.is_separate_memory else choice.malloc)

    def step(self, step: Step, batches: Sequence[Batch], total_labels: int) -> Outcome:
        """One optimizer step. One that fails leaves no gradients.

        Args:
            batches: the micro-batches of this process. total_labels: of the whole effective batch.
        Raises:
            UserError: fp16 overflows whatever the loss scale is. Exception: whatever is not for lack of memory.
        Memory: that of a pass over the micro-batches of one accumulation pass.
        """
        follow_machine()
        failure, loss, is_lost, is_late = None, 0.0, False, False
        update, weight_store = self.update, self.blockwise.weight_store
        waited = weight_store.waited_seconds()
        try:
            total = self.attempt(step, batches, total_labels)
            loss = float(total) if update.known_loss is None else update.known_loss
            is_lost = not update.is_finite
        except StepFailed:
            pass  # the sum below says so as well
        except Exception as error:
            is_lost = isinstance(error, NotFinite)
            if not is_lost and not self.device.is_out_of_memory(error):
                raise
            drop_frames(error)
            if update.reducer is not None:
                update.reducer.abort(Schedule(self.model).backward(), self.blockwise.zero_gradients)
            failure = None if is_lost else error
            is_late = isinstance(error, Lost)
        self.waited_seconds = weight_store.waited_seconds() - waited
        facts = (failure is not None, update.has_changed_weights or is_late, is_lost, is_late)
        loss, failed, begun, lost, late = self._sum_over(loss, *(float(fact) for fact in facts))
        if failed or lost:
            self.model.zero_grad()
            update.restore_scale()
        return Outcome(loss, failed > 0, not lost, begun > 0, failure, late > 0)

    def attempt(self, step: Step, batches: Sequence[Batch], total_labels: int) -> Tensor:
        """Gradients and update of a step; returns the summed loss of this process."""
        self.blockwise.objective.clear()
        self.update.begin(step)
        together = len(batches) if self.choice.accumulation_passes == 1 else self.choice.micro_batches_per_pass
        total = torch.zeros((), device=self.model.embedding.device)
        for first in range(0, len(batches), together or 1):  # the micro-batches of a pass are made when its turn comes
            is_last = first + together >= len(batches)
            with placed_together():  # until the pass has worked out all its indices
                if first == 0:
                    self.optimizer.place_keys(self.update.step)
                members = [self.micro_batch(batch) for batch in batches[first : first + together]]
                total += self.blockwise.gradients(members, total_labels, self.update, is_last)
        self.update.finish()
        return total

    def close(self) -> None:
        """Give back what is held outside of memory; no step can be made afterwards."""
        self.blockwise.weight_store.close()
