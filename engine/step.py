"""How does one optimizer step go? Accumulate, recover, apply.

accumulate: the gradients of all micro-batches, in one pass over the model or in several
apply:      each group of weights once its gradients are complete and summed over the processes; or all at the end
recover:    a step for which memory does not suffice, or whose numbers are not finite, is freed again; the other processes
            stop at the same place; all know afterwards what has happened, and whether weights were changed by it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.batches.collate import Batch
from devices.base import Device
from devices.malloc import trim_malloc
from engine.checkpointing import Checkpointing
from engine.finite import Lost, NotFinite, OnReady, StepChecks
from engine.micro_batches import MicroBatch, to_micro_batch
from engine.offload import CheckpointedActivations, Offload
from engine.optimizers import Optimizer, Step
from engine.schedule import Schedule
from engine.sharing.reduce import Reducer, StepFailed
from engine.sharing.sharding import Shards
from engine.update import Update
from engine.walk import Walk, no_trim
from memory.cleanup import drop_frames
from memory.estimate.workload import ExecutionPlan
from model.t5 import T5

SumOver = Callable[..., list[float]]


def alone(*numbers: float) -> list[float]:
    """The sum of each number over one process."""
    return list(numbers)


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
        walk: forms the gradients. update: applies them; it holds the optimizer. device: where all of it lies.
        choice: the plan's, which the walk was made by.
        checks: what is looked at in every step. shards: which weights are sharded; None: none.
        num_processes: that train together. sum_over: sums each of some numbers over them. hosts: see `engine.sharing.reduce`.
    """

    def __init__(
        self,
        walk: Walk,
        update: Update,
        device: Device,
        choice: ExecutionPlan,
        checks: StepChecks | None = None,
        shards: Shards | None = None,
        num_processes: int = 1,
        sum_over: SumOver = alone,
        hosts: dist.ProcessGroup | None = None,
    ) -> None:
        self.walk, self.update, self.device, self.choice, self.shards = walk, update, device, choice, shards
        self.checks, self._sum_over = checks or StepChecks(shards), sum_over
        self.checks.is_late = update.holds_all
        self.waited_seconds = 0.0  # in the last step, for weights that rest elsewhere
        self._reducer = Reducer(update.ready, num_processes, shards, hosts)

    @property
    def model(self) -> T5:
        return self.walk.model

    @property
    def optimizer(self) -> Optimizer:
        return self.update.optimizer

    @property
    def loss_scaling(self) -> dict[str, float] | None:
        """What a checkpoint keeps of the loss scale; None without fp16."""
        return None if self.update.scaling is None else self.update.scaling.as_dict()

    def micro_batch(self, batch: Batch) -> MicroBatch:
        """A batch on the device, filled up to the sizes that the plan has chosen."""
        return to_micro_batch(batch, self.model.config, self.device.torch_device, self.choice.sizes)

    def follow(self, choice: ExecutionPlan) -> None:
        """Follow a changed plan: saved blocks, chunks of the loss and offload as `choice` says; dtypes stay."""
        self.choice, checkpointed = choice, self.walk.policies.checkpointed
        if choice.offload_boundaries != isinstance(checkpointed, Offload):  # else its slabs would be taken twice
            checkpointed = checkpointed_of(choice, self.device)
        checkpointing, trim = Checkpointing(choice.saved_blocks), trim_of(choice, self.device)
        self.walk.follow(checkpointing, choice.loss_chunk_bytes, checkpointed, trim)

    def step(self, step: Step, batches: Sequence[Batch], total_labels: int) -> Outcome:
        """One optimizer step. One that fails leaves no gradients.

        Args:
            batches: the micro-batches of this process. total_labels: of the whole effective batch.
        Raises:
            UserError: fp16 overflows whatever the loss scale is. Exception: whatever is not for lack of memory; with sharded
                weights that too.
        Memory: the walk's, over the micro-batches of one accumulation pass.
        """
        failure, loss, is_lost, is_late = None, 0.0, False, False
        waited = self.walk.weight_store.waited_seconds()
        try:
            self.update.begin(step)
            total = self.attempt(batches, total_labels)
            loss = float(total) if self.checks.seen_loss is None else self.checks.seen_loss
            is_lost = not self.update.is_finite
        except StepFailed:
            pass  # the sum below says so as well
        except Exception as error:
            is_lost = isinstance(error, NotFinite)
            if not is_lost and (not self.device.is_out_of_memory(error) or self.shards is not None):
                raise
            self._abandon(error)
            failure = None if is_lost else error
            is_late = isinstance(error, Lost)
        self.waited_seconds = self.walk.weight_store.waited_seconds() - waited
        told = (failure is not None, self.update.has_begun or is_late, is_lost, is_late)
        loss, failed, begun, lost, late = self._sum_over(loss, *(float(fact) for fact in told))
        if failed or lost:
            self.model.zero_grad()
            self.update.keep_scale()
        return Outcome(loss, failed > 0, not lost, begun > 0, failure, late > 0)

    def attempt(self, batches: Sequence[Batch], total_labels: int) -> Tensor:
        """Gradients and update of a step that `update` was told of; returns the summed loss of this process."""
        self.walk.objective.clear()
        self.checks.begin()
        self._reducer.begin()
        on_ready = self.checks.watching(self._reducer.ready)
        together = len(batches) if self.choice.accumulation_passes == 1 else self.choice.micro_batches_per_pass
        parts = [batches[first : first + together] for first in range(0, len(batches), together or 1)]
        passes = ([self.micro_batch(batch) for batch in part] for part in parts)
        total = accumulate(self.walk, passes, len(parts), total_labels, on_ready)
        self._reducer.finish()
        self.update.finish(self._held_norm())
        self.checks.earlier, self.update.unseen_norm = self.update.unseen_norm, None
        return total

    def _held_norm(self) -> float | None:
        """What the update needs to know of the gradients that it holds, where a GPU has to be asked: once in the step.

        Raises:
            NotFinite: this process's loss is not. So is its gradient, which all processes have a part in; none updates.
        """
        norm = self.update.held_norm()
        if norm is None:
            return None
        seen = self.checks.late(norm)
        if not math.isfinite(self.checks.seen_loss or 0.0):
            raise NotFinite
        return seen

    def close(self) -> None:
        """Give back what is held outside of memory; no step can be made afterwards."""
        self.walk.weight_store.close()

    def _abandon(self, error: Exception) -> None:
        """Free an aborted step; the other processes stop at the same place. Sharded ones all stop by themselves."""
        drop_frames(error)
        if self.shards is None:
            self._reducer.abandon(Schedule(self.model).hand_over_order(), self.walk.zero_gradients)


def accumulate(
    walk: Walk, passes: Iterable[Sequence[MicroBatch]], count: int, total_labels: int, on_ready: OnReady
) -> Tensor:
    """Form the gradients of one step: in one accumulation pass over all micro-batches, or in several.

    Args:
        passes: the micro-batches of each, made when its turn comes. count: of the passes.
        total_labels: labels (or pairs of answers) of the whole effective batch, over all micro-batches and processes.
        on_ready: as of `Walk.gradients`; only the last pass hands over.
    Returns:
        the summed loss, a fp32 scalar on the device.
    Memory: that of one pass; from the second on, beside the gradients of all weights.
    """
    total = torch.zeros((), device=walk.model.embedding.device)
    for number, members in enumerate(passes, 1):
        total += walk.gradients(members, total_labels, on_ready if number == count else _hold_back)
    return total


def _hold_back(weights: Sequence[nn.Parameter]) -> None:
    """Hand nothing over: the gradients stay, and the next pass adds to them."""


def checkpointed_of(choice: ExecutionPlan, device: Device) -> CheckpointedActivations:
    """Where checkpointed activations wait, by the plan."""
    return Offload(device.host_copies()) if choice.offload_boundaries else CheckpointedActivations()


def trim_of(choice: ExecutionPlan, device: Device) -> Callable[[], object]:
    """What gives freed memory back inside a step, where the plan lets the allocator hold it."""
    return trim_malloc if choice.malloc == "fast" and not device.is_separate_memory else no_trim
