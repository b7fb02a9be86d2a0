"""All-reduce of gradients: each block's are summed over all processes as soon as they are complete.

Losses are scaled by the labels of the whole effective batch, so the sum over processes is the gradient: no averaging.
The sum of one block runs while the next block computes, on a GPU in one collective for each dtype; DDP's buckets, which
would hold all gradients, are not used.

A process that fails in the middle of a pass, for lack of memory, would leave the others waiting for its gradients. With
every group of weights goes one number, 1 from a process that has failed. All read it at the same point of the pass, and
all stop there, with the same groups updated: the step can be run again, after a rollback where one was. The number lies
on the host, which knows of a failure as it starts kernels, and goes over a process group of hosts: no GPU is waited
for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from devices.base import is_host

Weights = Sequence[nn.Parameter]


class StepFailed(Exception):
    """Another process could not finish this step; all processes stopped at the same point."""


class GroupSum:
    """Sums over all processes under way: the gradients of a group of weights, and the number of processes that have
    failed.
    """

    def __init__(self, weights: Weights, hosts: dist.ProcessGroup | None, has_failed: bool = False) -> None:
        self.weights = weights
        self._failures = torch.full((1,), float(has_failed))
        self._works: list[dist.Work] = [dist.all_reduce(self._failures, group=hosts, async_op=True)]
        # On a GPU starting a sum takes longer than most of them, so that those of one dtype go together.
        on_gpu: dict[torch.dtype, list[Tensor]] = {}
        for weight in weights:
            if weight.grad is None:
                continue
            if is_host(weight.grad):
                self._works.append(dist.all_reduce(weight.grad, async_op=True))
            else:
                on_gpu.setdefault(weight.grad.dtype, []).append(weight.grad)
        for gradients in on_gpu.values():
            assert dist.group.WORLD is not None
            self._works.append(dist.group.WORLD.allreduce_coalesced(gradients))

    def wait(self) -> bool:
        """Wait for all sums, on a GPU in its own queue; returns whether a process has failed."""
        for work in self._works:
            work.wait()
        return bool(self._failures.item())


class OneProcess:
    """What a `Reducer` does where there is one process: its gradients are final at once."""

    def begin(self) -> None:
        """A step begins."""

    def start(self, weights: Weights) -> Weights:
        """The weights whose gradients are final: these."""
        return weights

    def finish(self) -> Weights:
        """No weights are under way."""
        return []

    def abort(self, order: Sequence[Weights], zero_gradients: Callable[[Weights], None]) -> None:
        """Nobody waits for this process."""


class Reducer(OneProcess):
    """Sums the gradients of weights over processes; they are final one block later.

    Args:
        hosts: over which tensors of the host are summed; None: the default group.
    Memory: the gradients of two blocks instead of one.
    """

    def __init__(self, hosts: dist.ProcessGroup | None = None) -> None:
        self.hosts = hosts
        self.begin()

    def begin(self) -> None:
        """A step begins: no group has been started."""
        self._pending: GroupSum | None = None
        self._started = 0  # Groups of this pass.

    def start(self, weights: Weights) -> Weights:
        """Start summing these gradients; returns the weights before, whose sums are there; at first none.

        Raises:
            StepFailed: another process has failed; nothing of this group or the one before is final.
        """
        previous = self._pending
        self._pending = GroupSum(weights, self.hosts)
        self._started += 1
        return self._complete(previous)

    def finish(self) -> Weights:
        """The weights that were started last, once their sums are there.

        Raises:
            StepFailed: as `start`.
        """
        previous = self._pending
        self._pending = None
        return self._complete(previous)

    def abort(self, order: Sequence[Weights], zero_gradients: Callable[[Weights], None]) -> None:
        """Tell the others that this process cannot finish the pass, so that they stop instead of waiting for it.

        Call it after an error in the pass or in an update, once memory is free again; gradients are lost.

        Args:
            order: the groups as a pass starts them. zero_gradients: `Blockwise.zero_gradients`.
        Memory: the gradients of two groups, zeros.
        """
        is_known = self._pending is not None and self._pending.wait()
        # The others stop after the group that follows the first one that says so.
        for weights in order[self._started : self._started + (1 if is_known else 2)]:
            zero_gradients(weights)
            GroupSum(weights, self.hosts, has_failed=True).wait()
            for weight in weights:
                weight.grad = None
        self.begin()

    def _complete(self, group: GroupSum | None) -> Weights:
        if group is None:
            return []
        if group.wait():
            if self._pending is not None:
                self._pending.wait()
            self.begin()
            raise StepFailed("another process failed in the middle of the step")
        return group.weights
