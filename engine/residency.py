"""Where are a block's weights, and as what, while it is not visited?

The walk brings a block's weights before its visit and lets them go after it. The simplest residency leaves them where
they are. `CastOnVisit` stores them small (bf16) and computes with a wider copy (fp32) that lives as long as the visit:
on a chip without bf16 units that is the memory of bf16 at the speed of fp32. `Int8Tables` does so for frozen tables in
int8; the matrices of blocks need no visit there, as a product widens them one at a time (`model.quantization`). The head
is only glanced at on a CPU: no wide copy of the largest matrix of all. Weights on disk or on other ranks fit the same seam. What changes is `weight.data`; graphs kept from forward see the copy that is brought again for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from model.quantization import dequantize, is_int8


class Residency:
    """Weights stay where they are and are used as they are stored."""

    is_collective = False  # whether all processes have to visit the same weights at the same time

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self.compute_dtype = compute_dtype

    @contextmanager
    def visit(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        """Have `weights` ready to compute with until the context ends."""
        yield

    @contextmanager
    def stored(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        """Have `weights` whole, as they are stored, until the context ends."""
        yield

    def glance(self, weights: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Have `weights` ready for products that widen them as they go, without a graph, until the context ends.

        For writing answers, where a block sees a few tokens, and for the head. On a CPU narrow weights stay as they are
        stored: products widen them in pieces, at less cost than a visit's copy.
        """
        found = list(weights)
        matrices = [w for w in found if w.dim() == 2]
        is_narrow = all(w.device.type == "cpu" and w.dtype.itemsize < self.compute_dtype.itemsize for w in matrices)
        return self.stored(found) if is_narrow else self.visit(found)

    def dtype_of(self, weight: nn.Parameter) -> torch.dtype:
        """What a weight is during its visit, and what its gradient is formed in."""
        return weight.dtype

    def open_gradient(self, weight: nn.Parameter) -> Tensor:
        """The buffer that gradients of a whole weight are added into, in the dtype of its visit; zeros at first."""
        if weight.grad is None:
            zeros = torch.zeros(weight.shape, dtype=self.dtype_of(weight), device=weight.device)
            self.attach_gradient(weight, zeros)
        assert weight.grad is not None
        return weight.grad

    def close_gradient(self, weight: nn.Parameter) -> None:
        """Nothing is added into the buffer for a while."""

    @staticmethod
    def attach_gradient(weight: nn.Parameter, gradient: Tensor) -> None:
        """Give a weight a gradient of another shape or dtype than it has at rest; autograd looks at assignment alone."""
        stored = weight.data
        weight.data = gradient
        weight.grad = gradient
        weight.data = stored


class CastOnVisit(Residency):
    """Weights are stored in one dtype and computed in another. Memory: one block's weights in the compute dtype."""

    @contextmanager
    def visit(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        stored = [(w, w.data) for w in weights if self._is_cast(w)]
        for weight, data in stored:
            weight.data = data.to(self.compute_dtype)
        try:
            yield
        finally:
            for weight, data in stored:
                weight.data = data

    def dtype_of(self, weight: nn.Parameter) -> torch.dtype:
        return self.compute_dtype if self._is_cast(weight) else weight.dtype

    def _is_cast(self, weight: nn.Parameter) -> bool:
        """Narrow weights are; of fp32 ones, matrices for products in fp16: norms compute in fp32 anyway."""
        if weight.dtype == torch.float32:
            return self.compute_dtype == torch.float16 and weight.dim() == 2
        return weight.dtype not in (self.compute_dtype, torch.int8)


class Int8Tables(Residency):
    """Frozen weights lie in int8. Memory: on a device, embedding or head in the compute dtype while the loss is formed.

    Args:
        tables: embedding and head, which are used as they are and not through a product of a block.
    """

    def __init__(self, compute_dtype: torch.dtype, tables: Iterable[nn.Parameter]) -> None:
        super().__init__(compute_dtype)
        self._tables = {id(table) for table in tables}

    @contextmanager
    def visit(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        stored = [(w, w.data) for w in weights if id(w) in self._tables and is_int8(w)]
        for weight, _ in stored:
            weight.data = dequantize(weight, self.compute_dtype)
        try:
            yield
        finally:
            for weight, data in stored:
                weight.data = data


def residency_for(
    storage_dtype: torch.dtype, compute_dtype: torch.dtype, tables: Iterable[nn.Parameter] = ()
) -> Residency:
    """The residency that these dtypes need; `tables` are the model's embedding and head, asked for by int8 alone."""
    if storage_dtype == torch.int8:
        return Int8Tables(compute_dtype, tables)
    return (Residency if storage_dtype == compute_dtype else CastOnVisit)(compute_dtype)
