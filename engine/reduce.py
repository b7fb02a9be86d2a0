"""How do processes share gradients? Each block's are summed over all processes as soon as they are complete.

Losses are scaled by the labels of the whole effective batch, so the sum over processes is the gradient: no averaging.
The sum of one block runs while the next block computes; DDP's buckets, which would hold all gradients, are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

Weights = Sequence[nn.Parameter]


class Reducer:
    """Passes complete weights on to `then`, summed over processes; one block late where there are several.

    Args:
        then: what happens to weights whose gradients are final (the update).
        num_processes: 1 passes straight on.
    Memory: the gradients of two blocks instead of one.
    """

    def __init__(self, then: Callable[[Weights], None], num_processes: int) -> None:
        self.then, self.num_processes = then, num_processes
        self._pending: tuple[Weights, list[dist.Work]] | None = None

    def ready(self, weights: Weights) -> None:
        """Start summing these gradients, and finish those before."""
        if self.num_processes == 1:
            return self.then(weights)
        sums = [dist.all_reduce(w.grad, async_op=True) for w in weights if w.grad is not None]
        self.finish()
        self._pending = (weights, sums)

    def finish(self) -> None:
        """Wait for the sums under way and pass those weights on. Call once more behind the walk."""
        if self._pending is not None:
            weights, sums = self._pending
            self._pending = None
            for work in sums:
                work.wait()
            self.then(weights)
