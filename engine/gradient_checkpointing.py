"""Gradient checkpointing: the last blocks of a pass keep their graphs for backward, the earlier ones are recomputed.

A saved block costs its activations for the time between; a recomputed one keeps only its input, the checkpointed activation,
and costs one more forward, without the block's last product, whose result backward does not need. Both give the same numbers:
dropout is a function of the row and the position, never of a generator's state. No `torch.utils.checkpoint`: its first call
imports the compiler front end, 80 MB.
Source: Chen et al. 2016 (arXiv 1604.06174).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from devices.malloc import HeapTrimmer
from model.layers import adding_in_place


class BlockFunction(Protocol):
    """One block with everything but its input given: (N, D) -> (N, D)."""

    def __call__(self, x: Tensor, /, *, graph_only: bool = ...) -> Tensor:
        """With `graph_only` the result stands for its graph alone, and what backward does not need is left out."""


def is_saved(number: int, num_blocks: int, saved_blocks: int) -> bool:
    """Whether block `number`, in forward order, keeps its graph: the last blocks do, which backward needs first."""
    return number >= num_blocks - saved_blocks


class CheckpointedBlock:
    """One block on one micro-batch: forward once, backward once.

    Args:
        block: the function of the block.
        x: its input; held until backward (the checkpointed activation), or until there is a saved graph.
        is_saved: whether the graph stays until backward.
        dtype: of the residual stream in the block; x may wait in a narrower one.
        needs_input: whether the gradient of x is needed; not below the lowest block that is trained.
        heap: trimmed where more is free than one block works with.
    """

    def __init__(
        self,
        block: BlockFunction,
        x: Tensor,
        is_saved: bool,
        dtype: torch.dtype,
        needs_input: bool = True,
        heap: HeapTrimmer | None = None,
    ) -> None:
        self.block = block
        self.dtype = dtype
        self.heap = heap or HeapTrimmer("small")
        self.is_saved = is_saved
        self.needs_input = needs_input
        self.x: Tensor | None = x.detach()
        self.entry: Tensor | None = None  # The leaf of the graph: x in that dtype.
        self.seed: Tensor | None = None  # Backward through a saved graph starts here, without the block's output.
        self._output_gradient: list[Tensor] = []  # Empty until it is known.

    def forward(self) -> Tensor:
        """The block's output, outside of any graph."""
        if not self.is_saved:
            assert self.x is not None
            with torch.no_grad():
                return self.block(self.x.to(self.dtype))
        output = self._run(graph_only=False)
        self.seed = _seed(output, self._output_gradient)
        self.heap.trim_excess()
        return output.detach()

    def backward(self, grad: Tensor) -> Tensor | None:
        """Add to the gradients of the block's weights; return the gradient of its input, None where it is not needed."""
        before = self.heap.used_bytes()
        seed = self.seed
        self.seed = None
        if seed is None:
            seed = _seed(self._run(graph_only=True), self._output_gradient)
            self.heap.trim_excess(before)
        self._output_gradient.append(grad)
        del grad  # It is freed as soon as backward has used it.
        with adding_in_place():
            seed.backward()
        assert self.entry is not None
        grad_x = self.entry.grad
        assert grad_x is not None or not self.needs_input
        self.entry = None
        del seed
        if self.is_saved:
            self.heap.trim_excess(before)
        return grad_x

    def _run(self, *, graph_only: bool) -> Tensor:
        assert self.x is not None
        self.entry = self.x.to(self.dtype).requires_grad_(self.needs_input)
        self.x = None
        with torch.enable_grad():
            return self.block(self.entry, graph_only=graph_only)


class _Seed(torch.autograd.Function):
    """A scalar whose gradient with respect to x is the one that `gradient` holds by then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


def _seed(output: Tensor, gradient: list[Tensor]) -> Tensor:
    """A scalar from which backward starts at `output`, with the one tensor in `gradient`. It holds the graph, not the output."""
    with torch.enable_grad():
        return _Seed.apply(output, gradient)  # type: ignore[no-any-return]


def backward_from(output: Tensor, grad: Tensor) -> None:
    """Backward from `output` with its gradient, as `torch.autograd.backward(output, grad)` does.

    Given a gradient, torch checks its shape with code that imports sympy: 35 MB. Of a scalar it asks for none.
    """
    _seed(output, [grad]).backward()
