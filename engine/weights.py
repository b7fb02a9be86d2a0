"""Weight stores: where and in which dtype weights are stored, and in which they are computed with.

A pass asks for a block's weights in the compute dtype before it runs the block, and releases them after it. The plain
store does nothing. `CastWeightStore` has a narrow storage dtype (bf16) and computes with a wider copy (fp32) that lives
while its block runs: on a chip without bf16 units that is the memory of bf16 at the speed of fp32.
`QuantizedWeightStore` does so for frozen tables in int8; the matrices of blocks need no copy there, since products
widen them one at a time (`model.quantization`). On a CPU the head is not copied either: products widen it in pieces.
Weights in files (`engine.weight_offload`) fit the same interface. What changes is `weight.data`; graphs saved in
forward see the copy made for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from devices.base import is_host
from model.layers import as_one
from model.quantization import QUANTIZED, dequantize, is_int8


class WeightStore:
    """The storage dtype is the compute dtype: weights are used in place."""

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self.compute_dtype = compute_dtype

    @contextmanager
    def in_compute_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        """`weights` in the compute dtype, until the context ends."""
        yield

    def waited_seconds(self) -> float:
        """How long uses of weights have waited so far for those that were not loaded yet."""
        return 0.0

    def expect(self, weights: Sequence[nn.Parameter], upcoming: Iterable[Sequence[nn.Parameter]]) -> None:
        """Begin to load what is needed next, while the block before it computes.

        Args:
            weights: of the next block of this stack; none: another stack follows. upcoming: of all blocks to come, in
                order.
        """

    @contextmanager
    def loaded(self, weights: Iterable[nn.Parameter], is_changed: bool = False) -> Iterator[None]:
        """`weights` in the storage dtype and in memory, until the context ends.

        Args:
            is_changed: what is written to them has to outlast the context.
        """
        yield

    def buffer_groups(self, weights: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """`weights` in the groups that come into memory together, which `loaded` takes one at a time."""
        yield list(weights)

    def each_loaded(self, weights: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        """One weight after the other, in memory until the next one is asked for."""
        for group in self.buffer_groups(weights):
            with self.loaded(group):
                yield from group

    def close(self) -> None:
        """Give back what is held outside of memory."""

    def for_products(self, weights: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """`weights` for products without a graph, which can widen narrow ones in pieces, until the context ends.

        For generation, where a block sees a few tokens, and for the head. On a CPU narrow weights stay in the storage
        dtype: products widen them in pieces, at less cost than a copy of all.
        """
        used = list(weights)
        # Norms are small, and adapters and bias tables are stored in fp32.
        widths = {w.dtype.itemsize for w in used if w.dim() == 2 and w.dtype != self.compute_dtype and w.is_cpu}
        is_narrow = bool(widths) and max(widths) < self.compute_dtype.itemsize
        return nullcontext() if is_narrow else self.in_compute_dtype(used)

    def dtype_of(self, weight: nn.Parameter) -> torch.dtype:
        """The dtype that a weight is computed in, and that its gradient has."""
        return weight.dtype

    def open_gradient(self, weight: nn.Parameter) -> Tensor:
        """The buffer that gradients of a weight are added into, in the compute dtype; zeros at first."""
        if weight.grad is None:
            zeros = torch.zeros(weight.shape, dtype=self.dtype_of(weight), device=weight.device)
            # Autograd compares dtypes on assignment alone, and the gradient may have another than the stored weight.
            at_rest = weight.data
            weight.data = zeros
            weight.grad = zeros
            weight.data = at_rest
        assert weight.grad is not None
        return weight.grad


class CastWeightStore(WeightStore):
    """Storage dtype and compute dtype differ. Memory: one block's weights in the compute dtype."""

    @contextmanager
    def in_compute_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        at_rest = [(weight, weight.data) for weight in weights if self._is_cast(weight)]
        for run in _runs([weight for weight, _ in at_rest]):
            if is_int8(run[0]):
                run[0].data = dequantize(run[0], self.compute_dtype)
                continue
            whole = as_one([weight.data for weight in run], 0)
            assert whole is not None, "weights of a run lie below each other"
            parts = whole.to(self.compute_dtype).split([len(weight) for weight in run])
            for weight, part in zip(run, parts, strict=True):
                weight.data = part
        try:
            yield
        finally:
            for weight, data in at_rest:
                weight.data = data

    def dtype_of(self, weight: nn.Parameter) -> torch.dtype:
        return self.compute_dtype if self._is_cast(weight) else weight.dtype

    def _is_cast(self, weight: nn.Parameter) -> bool:
        """Narrow weights are; of fp32 ones, matrices for products in fp16: norms compute in fp32 anyway."""
        if weight.dtype == torch.float32:
            return self.compute_dtype == torch.float16 and weight.dim() == 2
        return weight.dtype not in (self.compute_dtype, torch.int8)


def _runs(weights: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """On a GPU weights that lie one below the other in memory together: so do their copies, and one product serves
    them.
    """
    runs: list[list[nn.Parameter]] = []
    for weight in weights:
        is_alone = is_host(weight) or is_int8(weight) or not runs
        if is_alone or as_one([last.data for last in (*runs[-1], weight)], 0) is None:
            runs.append([weight])
        else:
            runs[-1].append(weight)
    return runs


class QuantizedWeightStore(CastWeightStore):
    """Frozen weights are stored in int8, or in int4 and tables in int8. Memory: on a device, embedding or head in the
    compute dtype while the loss is formed.

    Args:
        tables: embedding and head, which are read without a block's product.
    """

    def __init__(self, compute_dtype: torch.dtype, tables: Iterable[nn.Parameter]) -> None:
        super().__init__(compute_dtype)
        self._tables = {id(table) for table in tables}

    def _is_cast(self, weight: nn.Parameter) -> bool:
        return id(weight) in self._tables and is_int8(weight)


def weight_store_for(
    storage_dtype: torch.dtype, compute_dtype: torch.dtype, tables: Iterable[nn.Parameter] = ()
) -> WeightStore:
    """The weight store for these dtypes; `tables` are the model's embedding and head, needed for quantized weights
    alone.
    """
    if storage_dtype in QUANTIZED:
        return QuantizedWeightStore(compute_dtype, tables)
    return (WeightStore if storage_dtype == compute_dtype else CastWeightStore)(compute_dtype)
