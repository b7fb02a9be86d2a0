"""How do processes share gradients? Each block's are summed over all processes as soon as they are complete.

Losses are scaled by the labels of the whole effective batch, so the sum over processes is the gradient: no averaging.
The sum of one block runs while the next block computes; DDP's buckets, which would hold all gradients, are not used.
Matrices that are sharded over the processes get the sum of their own rows alone (see `engine/sharing/sharding.py`).

A process that fails in the middle of a walk, for lack of memory, would leave the others waiting for its gradients. With
every group of weights goes one number, 1 from a process that has failed. All read it at the same place of the walk, and
all stop there, with the same groups updated: the step can be run again, after a rollback where one was. The number lies on
the host, which knows of a failure as it starts kernels, and goes over a process group of hosts: no GPU is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.sharing.sharding import Shards
from engine.weights import WeightStore

Weights = Sequence[nn.Parameter]


class StepFailed(Exception):
    """Another process could not finish this step; all processes stopped at the same place."""


@dataclass
class _Group:
    """Sums under way: a group of weights, its place in the walk, and whether a process has failed before it."""

    weights: Weights
    index: int
    failed: Tensor
    works: list[dist.Work]
    parts: list[tuple[nn.Parameter, Tensor]]

    def wait(self) -> bool:
        """Wait for all sums, on a GPU in its own queue; returns whether a process has failed."""
        for work in self.works:
            work.wait()
        return bool(self.failed.item())


class Reducer:
    """Passes complete weights on to `then`, summed over processes; one block late where there are several.

    Args:
        then: what happens to weights whose gradients are final (the update).
        num_processes: 1 passes straight on.
        shards: which weights are sharded; None: none.
        hosts: over which tensors of the host are summed; None: the default group.
    Memory: the gradients of two blocks instead of one.
    """

    def __init__(
        self,
        then: Callable[[Weights], None],
        num_processes: int,
        shards: Shards | None = None,
        hosts: dist.ProcessGroup | None = None,
    ) -> None:
        self.then, self.num_processes, self.shards, self.hosts = then, num_processes, shards, hosts
        self._pending: _Group | None = None
        self._started = 0  # groups of this walk

    def begin(self) -> None:
        """A step begins: no group has been handed over."""
        self._pending, self._started = None, 0

    def ready(self, weights: Weights) -> None:
        """Start summing these gradients, and finish those before.

        Raises:
            StepFailed: another process has failed; nothing of this group or the one before has been passed on.
        """
        if self.num_processes == 1:
            return self.then(weights)
        before, self._pending = self._pending, self._start(weights)
        if before is not None:
            self._complete(before)

    def finish(self) -> None:
        """Wait for the sums under way and pass those weights on. Call once more after the walk.

        Raises:
            StepFailed: as `ready`.
        """
        before, self._pending = self._pending, None
        if before is not None:
            self._complete(before)

    def abandon(self, order: Sequence[Weights], zero_gradients: Callable[[Weights], None]) -> None:
        """Tell the others that this process cannot finish the walk, so that they stop instead of waiting for it.

        Call it after an error in the walk or in an update, once memory is free again; gradients are lost.

        Args:
            order: `engine.schedule.Schedule.hand_over_order()`. zero_gradients: `Walk.zero_gradients`.
        Memory: the gradients of two groups, zeros.
        """
        if self.num_processes > 1:
            assert self.shards is None, "a walk over sharded weights cannot be joined in its middle"
            told = self._pending is not None and self._pending.wait()
            # the others stop after the group that follows the first one that says so
            for weights in order[self._started : self._started + (1 if told else 2)]:
                zero_gradients(weights)
                self._start(weights, failed=True).wait()
                for weight in weights:
                    weight.grad = None
        self._pending, self._started = None, 0

    def _start(self, weights: Weights, failed: bool = False) -> _Group:
        flag = torch.full((1,), float(failed))
        group = _Group(weights, self._started, flag, [dist.all_reduce(flag, group=self.hosts, async_op=True)], [])
        self._started += 1
        for weight in weights:
            if weight.grad is None:
                continue
            if self.shards is None or not self.shards.is_sharded(weight):
                group.works.append(dist.all_reduce(weight.grad, async_op=True))
            elif not self.shards.is_summed(weight):
                part, work = self.shards.scatter(weight)
                group.works.append(work)
                group.parts.append((weight, part))
                weight.grad = None  # the collective holds what it sends
        return group

    def _complete(self, group: _Group) -> None:
        if group.wait():
            if self._pending is not None:
                self._pending.wait()
            self._pending, self._started = None, 0
            raise StepFailed(f"another process failed in the middle of the step, before group {group.index}")
        for weight, part in group.parts:
            WeightStore.attach_gradient(weight, part)
        self.then(group.weights)
