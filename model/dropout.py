"""Dropout that keeps no mask, and drops the same however a batch is cut.

The mask of element d of token t in row b is a hash of (key of the row, site, t, d), see `devices.pointwise`. The backward pass
draws it again. Micro-batches, recompute, number of processes and resume cannot change it, and one 64-bit number serves four
elements, which on a CPU is several times cheaper than torch's own generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from devices.base import is_host, place, traits_of
from devices.kernels.calls import kernels_for
from devices.pointwise import (
    GOLDEN,
    MIX_1,
    MIX_2,
    fills_words,
    is_compiled,
    kernel,
    mix,
    mix_by_torch,
    random_words,
    scale_kept,
)
from model.rows import Rows

ADAPTER_SITES = 1 << 24  # the places of adapters begin here, after all others
SITES_TOGETHER = 8  # whose keys a GPU hashes in one go: the dropout of a block


def stride(number: int) -> int:
    """The `number`-th step of the counter, wrapped to int64 as tensors would wrap it."""
    return c_int64(number * GOLDEN).value


def mix_number(state: int) -> int:
    """The hash of one number, without a tensor."""
    state %= 2**64
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        state = (state ^ state >> shift) * factor % 2**64
    return c_int64(state ^ state >> 31).value


def mixed_places(rows: Rows, heads: int, part: slice, device: torch.device) -> Tensor:
    """(H, t) int64: what a row's key is moved on by for each head and query of attention; made on the host."""

    def make() -> Tensor:
        places = (np.arange(heads, dtype=np.int64)[:, None] << 32) + np.arange(part.start, part.stop)
        return place(torch.from_numpy(places * np.int64(MIX_1)), device)

    return rows.cached(("places", heads, part.start, part.stop, device), make)  # type: ignore[no-any-return]


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

    def _keys(self) -> Tensor:
        """(B,) int64: each row's key, at no site."""
        assert self.rows.keys is not None, "dropout needs a key for every row"
        return self.rows.keys.contiguous()

    def row_keys(self) -> Tensor:
        """(B,) int64: each row's key at this site."""
        if not is_host(keys := self._keys()):
            return self._keys_of_sites()[0][self.site % SITES_TOGETHER]
        return mix_by_torch(keys + stride(self.site + 1))

    def token_keys(self) -> Tensor:
        """(N,) int64: each token's key at this site."""
        if not is_host(keys := self._keys()):
            return self._keys_of_sites()[1][self.site % SITES_TOGETHER]
        places = self.rows.positions(keys.device) * MIX_1
        return mix_by_torch(self.row_keys()[self.rows.row_of_token(keys.device)] + places)

    def place_indices(self) -> None:
        """Bring to a GPU what the keys of tokens are made of."""
        if self.active or self.adapter_rate:
            device = self._keys().device
            self._first_sites(device)
            self.rows.row_of_token(device)
            self.rows.mixed_positions(MIX_1, device)

    def _first_sites(self, device: torch.device) -> Tensor:
        def make() -> Tensor:
            strides = np.array([stride(site + 1) for site in range(SITES_TOGETHER)], np.int64)
            return place(torch.from_numpy(strides[:, None]), device)

        return self.rows.cached(("first sites", device), make)  # type: ignore[no-any-return]

    def _keys_of_sites(self) -> tuple[Tensor, Tensor]:
        """(s, B) and (s, N): the keys of rows and of tokens at the sites of a block, on a GPU."""
        first, keys = self.site // SITES_TOGETHER * SITES_TOGETHER, self._keys()

        sites = self._first_sites(keys.device)

        def make() -> tuple[Tensor, Tensor]:
            of_rows = self.rows.cached(("keys of rows", first), lambda: mix(keys, sites, stride(first)))
            of_tokens = of_rows.index_select(1, self.rows.row_of_token(keys.device))
            return of_rows, mix(of_tokens, self.rows.mixed_positions(MIX_1, keys.device))

        return self.rows.latest("keys of sites", first, make)  # type: ignore[no-any-return]

    def is_one_kernel(self, x: Tensor) -> bool:
        """Whether a kernel draws and drops in one go."""
        return is_compiled("drop", x.device, x.dtype) and fills_words(x)

    def mask(self, keys: Tensor, like: Tensor, low: float = -math.inf) -> Callable[[Tensor], Tensor]:
        """Dropout of (N, width), for tensors of one shape and dtype, by the keys (N,) of their lines.

        Args:
            low: numbers below are raised to it first, where `is_one_kernel`.

        Memory: the result; where no kernel draws and drops in one go also the mask, and while it is drawn its random words.
        """
        width = like.shape[1]
        if self.is_one_kernel(like):
            places = self.rows.cached(
                ("words", width, like.device), lambda: torch.arange(width // 2, device=like.device)
            )
            drop, threshold, scale = kernel("drop", like.device), self.threshold, self.scale
            return lambda x: drop(x, keys, places, threshold, scale, low)
        kept = random_words(keys, width) >= self.threshold
        return lambda x: scale_kept(x, kept, self.scale)

    def dropped(self, x: Tensor) -> Tensor:
        """x (N, width) without what is dropped, the rest scaled. Memory: one output, and the random words of a chunk."""
        if compiled := kernels_for(x):
            out, tokens = x.clone(), (self.rows.row_of_token(x.device), self.rows.positions(x.device))
            compiled.drop_tokens(out, self._keys(), *tokens, stride(self.site + 1), self.threshold, self.scale)
            return out
        keys, x = self.token_keys(), x.contiguous()
        step = len(x) if self.is_one_kernel(x) else max(1, traits_of(x.device).dropped // x.shape[1])
        if len(x) <= step:
            return self.mask(keys, x)(x)
        out = torch.empty_like(x)
        for first in range(0, len(x), step):
            part = x[first : first + step]
            out[first : first + step] = self.mask(keys[first : first + step], part)(part)
        return out

    def __call__(self, x: Tensor, graph_only: bool = False) -> Tensor:
        """Drop elements of x (N, width). Memory: one output; no mask is kept.

        Args:
            graph_only: nothing reads the result, only backward passes through: x stands for it.
        """
        return _DropTokens.apply(x, self, graph_only) if self.active else x

    def of_relu(self, x: Tensor) -> Tensor:
        """Dropout of max(x, 0), where `is_one_kernel`. Memory: one output, which is all that backward needs."""
        return _DropReLU.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]


class _DropTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: Dropout, graph_only: bool) -> Tensor:
        ctx.dropout = dropout
        return x.view_as(x) if graph_only else dropout.dropped(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.dropout.dropped(grad), None, None


class _DropReLU(torch.autograd.Function):
    """On the way back in place on the gradient, a product that nothing else reads: what is not zero was kept and above zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: Dropout) -> Tensor:
        y = dropout.mask(dropout.token_keys(), x, low=0.0)(x)
        ctx.save_for_backward(y)
        ctx.scale = dropout.scale
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad).mul_(ctx.scale), None
