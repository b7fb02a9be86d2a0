"""How are activations dropped without keeping a mask, and the same way however a batch is cut?

The mask of element d of token t in row b is a hash of (key of the row, site, t, d): a counter-based generator, as in
Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", with the mixing of splitmix64 (Steele et al. 2014).
The backward pass draws it again. Micro-batches, recompute, number of processes and resume cannot change it, and one
64-bit number serves four elements, which on a CPU is several times cheaper than torch's own generator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from devices.kernels.calls import kernels, takes
from limits import DROPOUT_ELEMENTS
from model.rows import Rows

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1, _MIX_2 = -4658895280553007687, -7723592293110705685  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
ADAPTER_SITES = 1 << 24  # the places of adapters begin here, after all others


def stride(number: int) -> int:
    """The `number`-th step of the counter, wrapped to int64 as tensors would wrap it."""
    return (number * _GOLDEN + 2**63) % 2**64 - 2**63


def mix(state: Tensor) -> Tensor:
    """Hash int64 numbers; overwrites and returns `state`."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        state ^= _logical_shift(state, shift)
        state *= factor
    state ^= _logical_shift(state, 31)
    return state


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros; torch's own shift copies the sign, which would bias the highest word."""
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def random_words(keys: Tensor, count: int) -> Tensor:
    """Draw `count` 16-bit random numbers for each key.

    Args:
        keys: (...) int64.
    Returns:
        (..., count) int16, uniform.
    Memory: 8 bytes for every 4 numbers, twice.
    """
    counters = torch.arange(1, (count + 3) // 4 + 1, device=keys.device) * _GOLDEN
    return mix(keys.unsqueeze(-1) + counters).view(torch.int16)[..., :count]


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

    def of_adapter(self, offset: int, rows: Rows | None = None) -> Dropout | None:
        """The dropout of what the adapter at this place reads, its tokens being `rows`; None where nothing is dropped."""
        if not self.adapter_rate:
            return None
        return Dropout(self.adapter_rate, rows or self.rows, ADAPTER_SITES + self.site + offset)

    @property
    def active(self) -> bool:
        return self.rate > 0.0

    @property
    def threshold(self) -> int:
        """Smallest int16 that is kept."""
        return min(32767, round(self.rate * 65536) - 32768)

    @property
    def scale(self) -> float:
        """Exact inverse of the share that the 16-bit threshold keeps."""
        return 65536 / (32768 - self.threshold)

    def row_keys(self) -> Tensor:
        """(B,) int64: each row's key at this site."""
        assert self.rows.keys is not None, "dropout needs a key for every row"
        return mix(self.rows.keys + stride(self.site + 1))

    def token_keys(self) -> Tensor:
        """(N,) int64: each token's key at this site."""
        keys, device = self.row_keys(), self.rows.keys.device  # type: ignore[union-attr]
        return mix(keys[self.rows.row_of_token(device)] + self.rows.positions(device) * _MIX_1)

    def kept(self, width: int, keys: Tensor | None = None) -> Tensor:
        """(N, width) bool: which elements of the micro-batch stay; or of the tokens with these keys."""
        return random_words(self.token_keys() if keys is None else keys, width) >= self.threshold

    def drop_(self, x: Tensor) -> Tensor:
        """Drop elements of x (N, width), which is overwritten, and scale the others. Memory: a few chunks on a CPU."""
        keys, width = self.token_keys(), x.shape[-1]
        if (compiled := kernels()) is not None and takes(x):
            compiled.drop_tokens(x, keys, self.threshold, self.scale)
            return x
        step = max(1, DROPOUT_ELEMENTS // width) if x.device.type == "cpu" else len(x)
        x.mul_(self.scale)
        for first in range(0, len(x), step):
            part = slice(first, first + step)
            x[part].mul_(self.kept(width, keys[part]))
        return x

    def __call__(self, x: Tensor, graph_only: bool = False) -> Tensor:
        """Drop elements of x (N, width). Memory: one output; no mask is kept.

        Args:
            graph_only: nothing reads the result, only backward passes through: x stands for it.
        """
        return _DropTokens.apply(x, self, graph_only) if self.active else x


class _DropTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: Dropout, graph_only: bool) -> Tensor:
        ctx.dropout = dropout
        return x.view_as(x) if graph_only else dropout.drop_(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.dropout.drop_(grad.clone()), None, None
