"""All-reduce of gradients: each block's are summed over all processes as soon as they are complete.

Losses are scaled by the labels of the whole effective batch, so the sum over processes is the gradient: no averaging.
The sum of one block runs while the next block computes, on a GPU in one collective for each dtype; DDP's buckets, which would
hold all gradients, are not used.

A process that fails in the middle of a pass, for lack of memory, would leave the others waiting for its gradients. With
every group of weights goes one number, 1 from a process that has failed. All read it at the same point of the pass, and
all stop there, with the same groups updated: the step can be run again, after a rollback where one was. The number lies on
the host, which knows of a failure as it starts kernels, and goes over a process group of hosts: no GPU is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from devices.base import is_host

Weights = Sequence[nn.Parameter]


class StepFailed(Exception):
    """Another process could not finish this step; all processes stopped at the same point."""


@dataclass
class _Group:
    """Sums under way: a group of weights, its number in the pass, and whether a process has failed before it."""

    weights: Weights
    index: int
    failed: Tensor
    works: list[dist.Work]

    def wait(self) -> bool:
        """Wait for all sums, on a GPU in its own queue; returns whether a process has failed."""
        for work in self.works:
            work.wait()
        return bool(self.failed.item())


class Reducer:
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
        self._pending: _Group | None = None
        self._started = 0  # groups of this pass

    def start(self, weights: Weights) -> Weights:
        """Start summing these gradients; returns the weights before, whose sums are there; at first none.

        Raises:
            StepFailed: another process has failed; nothing of this group or the one before is final.
        """
        before, self._pending = self._pending, self._start(weights)
        return self._complete(before)

    def finish(self) -> Weights:
        """The weights that were started last, once their sums are there.

        Raises:
            StepFailed: as `start`.
        """
        before, self._pending = self._pending, None
        return self._complete(before)

    def abort(self, order: Sequence[Weights], zero_gradients: Callable[[Weights], None]) -> None:
        """Tell the others that this process cannot finish the pass, so that they stop instead of waiting for it.

        Call it after an error in the pass or in an update, once memory is free again; gradients are lost.

        Args:
            order: the groups as a pass starts them. zero_gradients: `Blockwise.zero_gradients`.
        Memory: the gradients of two groups, zeros.
        """
        is_known = self._pending is not None and self._pending.wait()
        # the others stop after the group that follows the first one that says so
        for weights in order[self._started : self._started + (1 if is_known else 2)]:
            zero_gradients(weights)
            self._start(weights, failed=True).wait()
            for weight in weights:
                weight.grad = None
        self.begin()

    def _start(self, weights: Weights, failed: bool = False) -> _Group:
        flag = torch.full((1,), float(failed))
        group = _Group(weights, self._started, flag, [dist.all_reduce(flag, group=self.hosts, async_op=True)])
        self._started += 1
        together: dict[torch.dtype, list[Tensor]] = {}  # on a GPU, where starting a sum takes longer than most of them
        for weight in weights:
            if weight.grad is None:
                continue
            if is_host(weight.grad):
                group.works.append(dist.all_reduce(weight.grad, async_op=True))
            else:
                together.setdefault(weight.grad.dtype, []).append(weight.grad)
        for gradients in together.values():
            assert dist.group.WORLD is not None
            group.works.append(dist.group.WORLD.allreduce_coalesced(gradients))
        return group

    def _complete(self, group: _Group | None) -> Weights:
        if group is None:
            return []
        if group.wait():
            if self._pending is not None:
                self._pending.wait()
            self.begin()
            raise StepFailed(f"another process failed in the middle of the step, before group {group.index}")
        return group.weights
