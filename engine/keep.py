"""Does a block keep its local graph from forward to backward, or is it run again?

A kept graph costs the block's activations for the time between; running again costs one more forward. Both give the same
numbers: dropout is a function of the row and the place, never of a generator's state. No `torch.utils.checkpoint`: its
first call imports the compiler front end, 80 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Keep:
    """Keep the graphs of the last `num_blocks` blocks of the walk; run the earlier ones again.

    The last blocks are the first that backward needs, so their graphs live the shortest.
    """

    num_blocks: int

    def keeps(self, index: int, total: int) -> bool:
        """Whether block `index` of `total` (in forward order) keeps its graph."""
        return index >= total - self.num_blocks


class Visit:
    """One block on one slice: forward once, backward once.

    Args:
        block: the function of the block, (N, D) -> (N, D).
        x: its input; held until backward (the boundary).
        keep: whether the graph stays.
    """

    def __init__(self, block: Callable[[Tensor], Tensor], x: Tensor, keep: bool) -> None:
        self.block, self.x = block, x.detach()
        self.output: Tensor | None = None
        self.keep = keep

    def forward(self) -> Tensor:
        """The block's output, outside of any graph."""
        if not self.keep:
            with torch.no_grad():
                return self.block(self.x)
        return self._run().detach()

    def backward(self, grad: Tensor) -> Tensor:
        """Add to the gradients of the block's weights; return the gradient of its input."""
        output = self._run() if self.output is None else self.output
        torch.autograd.backward(output, grad)
        grad_x = self.x.grad
        assert grad_x is not None
        self.output = self.x.grad = None
        return grad_x

    def _run(self) -> Tensor:
        self.x.requires_grad_()
        with torch.enable_grad():
            self.output = self.block(self.x)
        return self.output
