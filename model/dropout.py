"""Dropout of tokens, and where what is dropped comes from.

By compiled kernels it keeps no mask, and drops the same however a batch is cut: the mask of element d of token t in row
b is a hash of (key of the row, site, t, d), see `devices.pointwise`, which backward forms again. Elsewhere torch's own
generator draws, seeded by the micro-batch's first row and the site, so that a block that is computed again draws the
same. A row has another key in each step, and no two ranks or micro-batches have a row in common.
"""

from __future__ import annotations

from ctypes import c_int64
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from devices.base import seed_generator
from devices.kernels.calls import DTYPES, kernels
from devices.pointwise import GOLDEN, MIX_1, MIX_2, mix_by_torch
from model.rows import Rows

ADAPTER_SITES = 1 << 24  # The sites of adapters begin here, after all others.


def stride(number: int) -> int:
    """The `number`-th step of the counter, wrapped to int64 as tensors would wrap it."""
    return c_int64(number * GOLDEN).value


def mix_number(state: int) -> int:
    """The hash of one number, without a tensor."""
    state %= 2**64
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        state = (state ^ state >> shift) * factor % 2**64
    return c_int64(state ^ state >> 31).value


@dataclass(frozen=True)
class Dropout:
    """Dropout at one micro-batch: the rate, and where the random numbers come from.

    Args:
        rate: share of elements dropped, 0 to 1; the kept ones are scaled by 1 / (1 - rate).
        rows: layout of the tokens, with keys.
        site: a number for the place in the model, so that no two places share a mask.
        adapter_rate: share dropped of what adapters read.
    """

    rate: float
    rows: Rows
    site: int = 0
    adapter_rate: float = 0.0

    def at(self, offset: int) -> Dropout:
        """The same dropout at another place of the model."""
        return replace(self, site=self.site + offset)

    def of_adapter(self, offset: int, rows: Rows | None = None) -> Dropout:
        """The dropout of what the adapter at this site reads, its tokens being `rows`."""
        return Dropout(self.adapter_rate, rows or self.rows, ADAPTER_SITES + self.site + offset)

    @property
    def active(self) -> bool:
        return self.rate > 0.0

    @property
    def threshold(self) -> int:
        """Smallest int16 that compiled kernels keep."""
        return min(32767, round(self.rate * 65536) - 32768)

    @property
    def scale(self) -> float:
        """Exact inverse of the share that the 16-bit threshold keeps."""
        return 65536 / (32768 - self.threshold)

    @property
    def keys(self) -> Tensor:
        """(B,) int64: each row's key, at no site."""
        assert self.rows.keys is not None, "dropout needs a key for every row"
        return self.rows.keys.contiguous()

    def row_keys(self) -> Tensor:
        """(B,) int64: each row's key at this site."""
        return mix_by_torch(self.keys + stride(self.site + 1))

    def seed(self, *numbers: int) -> int:
        """What torch's generator is seeded with at this site, and further numbers."""
        key = int(self.keys[0])
        for number in (self.site, *numbers):
            key = mix_number(key + stride(number + 1))
        return key

    def begin(self, device: torch.device) -> None:
        """Seed torch's generator of a device for all that is dropped from here on, up to the next site that does so."""
        if self.active or self.adapter_rate:
            seed_generator(device, self.seed())

    def is_compiled(self, x: Tensor) -> bool:
        """Whether compiled kernels drop, of rows that lie end to end."""
        return x.is_cpu and x.dtype in DTYPES and not self.rows.groups and kernels() is not None

    def dropped(self, x: Tensor) -> Tensor:
        """x (N, width) without what compiled kernels drop, the rest scaled. Memory: one output."""
        compiled = kernels()
        assert compiled is not None
        out = x.clone(memory_format=torch.contiguous_format)
        tokens = self.rows.row_of_token(x.device), self.rows.positions(x.device)
        compiled.drop_tokens(out, self.keys, *tokens, stride(self.site + 1), self.threshold, self.scale)
        return out

    def __call__(self, x: Tensor, graph_only: bool = False) -> Tensor:
        """Drop elements of x (N, width). Memory: one output, and where torch draws a mask of a byte an element.

        Args:
            graph_only: nothing reads the result, only backward passes through: x may stand for it.
        """
        if not self.active:
            return x
        if self.is_compiled(x):
            return _DropTokens.apply(x, self, graph_only)  # type: ignore[no-any-return,no-untyped-call]
        return torch.native_dropout(x, self.rate, True)[0]

    def of_relu(self, x: Tensor) -> Tensor:
        """Dropout of max(x, 0); x is overwritten. Memory: one output; where torch draws, that is all that backward
        needs.
        """
        if self.active and not self.is_compiled(x):
            return _DropReLU.apply(x, self.rate)  # type: ignore[no-any-return,no-untyped-call]
        return self(_ReLU.apply(x))


NO_DROPOUT = Dropout(0.0, Rows(()))


class _ReLU(torch.autograd.Function):
    """max(x, 0), in place on x and, on the way back, in place on the gradient: both are products that nothing else
    reads.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.relu_())
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad)  # type: ignore[no-any-return]


class _DropTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: Dropout, graph_only: bool) -> Tensor:
        ctx.dropout = dropout
        return x.view_as(x) if graph_only else dropout.dropped(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.dropout.dropped(grad), None, None


class _DropReLU(torch.autograd.Function):
    """On the way back in place on the gradient, a product that nothing else reads: what is not zero was kept and above
    zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        y = torch.native_dropout(x.relu_(), rate, True)[0]
        ctx.save_for_backward(y)
        ctx.scale = 1 / (1 - rate)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad).mul_(ctx.scale), None
