"""Attention by compiled kernels, on CPUs.

Short rows pass through the cache whole, one (row, head) after the other: nothing is padded, gathered or written down
but the result. Long rows go in tiles, the products being torch's and what stands between them (bias, softmax, dropout
and their gradients) one pass of a kernel. Nothing is kept for backward but q, k and v.

Shapes: N query tokens, H heads, K d_kv, R distances; of a long row, h heads and t queries of a tile, and M padded keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from devices.kernels.calls import PARTS, Kernels, kernels
from devices.sizes import LONGEST_SHORT, long_tile
from model.dropout import Dropout
from model.rows import Rows


@dataclass(frozen=True)
class _Short:
    """Rows that kernels take whole.

    Args:
        rows: (n,) int64, the number of each in its micro-batch. places: where they begin and how long they are, (n,)
            int32 each.
    """

    rows: Tensor
    places: dict[str, Tensor]
    longest: int


@dataclass(frozen=True)
class _Long:
    """A row that goes in tiles of `block` queries and `heads` heads.

    Args:
        row: its number. queries: (L,) int32, the token of each place, last query first, below 0 where there is none.
        keys: (M,) int32, first key first. count: keys that are there.
    """

    row: int
    queries: Tensor
    keys: Tensor
    count: int
    block: int
    heads: int

    @property
    def reach(self) -> int:
        """How far apart padded queries and keys can lie, and 1."""
        return max(len(self.queries), len(self.keys))

    def parts(self) -> Iterator[slice]:
        """The places of the queries of each tile."""
        for first in range(0, len(self.queries), self.block):
            yield slice(first, min(first + self.block, len(self.queries)))


def _split(rows: tuple[Rows, Rows], heads: int) -> tuple[_Short | None, list[_Long]]:
    """Short and long rows, made once and kept with the query rows. Memory: 4 bytes a token of long rows, twice."""
    queries, keys = rows

    def make() -> tuple[_Short | None, list[_Long]]:
        lengths = list(zip(queries.lengths, keys.lengths, strict=True))
        short = [row for row, pair in enumerate(lengths) if max(pair) <= LONGEST_SHORT]
        long = [row for row, pair in enumerate(lengths) if max(pair) > LONGEST_SHORT]
        return _short(rows, short), [_long(rows, row, heads) for row in long]

    key = "compiled", heads, keys.lengths
    return queries.cached(key, make)  # type: ignore[no-any-return]


def _short(rows: tuple[Rows, Rows], members: list[int]) -> _Short | None:
    if not members:
        return None
    queries, keys = rows
    values = {
        "query_starts": queries.starts,
        "query_lengths": queries.lengths,
        "key_starts": keys.starts,
        "key_lengths": keys.lengths,
    }
    places = {name: torch.tensor([of[row] for row in members], dtype=torch.int32) for name, of in values.items()}
    longest = max(max(queries.lengths[row], keys.lengths[row]) for row in members)
    return _Short(torch.tensor(members), places, longest)


def _long(rows: tuple[Rows, Rows], row: int, heads: int) -> _Long:
    num_queries, num_keys = rows[0].lengths[row], rows[1].lengths[row]
    padded_queries, padded_keys, block, tile_heads = long_tile(heads, num_queries, num_keys)
    queries, keys = np.full(padded_queries, -1, np.int32), np.full(padded_keys, -1, np.int32)
    queries[:num_queries] = np.arange(num_queries) + rows[0].starts[row]
    keys[:num_keys] = np.arange(num_keys) + rows[1].starts[row]
    queries = np.ascontiguousarray(queries[::-1])  # last first
    return _Long(row, torch.from_numpy(queries), torch.from_numpy(keys), num_keys, block, tile_heads)


class _Call:
    """One attention: what forward and backward, short and long rows share; arguments as `model.attention.attend`."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        rows: tuple[Rows, Rows],
        causal: bool,
        dropout: Dropout,
    ) -> None:
        found = kernels()
        assert found is not None
        self.kernels: Kernels = found
        self.q, self.k, self.v, self.rows, self.causal, self.dropout = q, k, v, rows, causal, dropout
        self.heads, self.width = q.shape[1:]
        self.short, self.long = _split(rows, self.heads)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.row_keys = dropout.row_keys() if dropout.active else None

    def widened(self, reach: int) -> Tensor | None:
        """The bias of distances from -(reach - 1) to reach - 1: cut, or filled up for places without a token."""
        if self.bias is None:
            return None
        return F.pad(self.bias, (reach - 1 - self.bias.shape[1] // 2,) * 2).contiguous()

    def add_to_bias(self, total: Tensor, part: Tensor) -> None:
        """Add the gradient of a cut or filled-up bias (H, R')."""
        zero = total.shape[1] // 2
        other = part.shape[1] // 2
        reach = min(zero, other)
        total[:, zero - reach : zero + reach + 1] += part[:, other - reach : other + reach + 1]

    def attend_short(self, tensors: dict[str, Tensor], dbias: Tensor | None = None) -> None:
        """All short rows; `tensors`: out, or grad, dq, dk and dv. Adds to the gradient of the bias (H, R)."""
        short = self.short
        if short is None:
            return
        bias = self.widened(short.longest)
        # Gradients of the bias are summed apart in parts of the rows, whatever the number of threads.
        parts = min(PARTS, len(short.rows))
        sums = None if dbias is None else dbias.new_zeros(parts, len(dbias), 2 * short.longest - 1)
        self.kernels.attend_rows(
            q=self.q,
            k=self.k,
            v=self.v,
            bias=bias,
            dbias=sums,
            **short.places,
            row_keys=None if self.row_keys is None else self.row_keys[short.rows],
            is_bf16=self.q.dtype == torch.bfloat16,
            num_rows=len(short.rows),
            heads=self.heads,
            width=self.width,
            distances=2 * short.longest - 1,
            longest=short.longest,
            parts=parts,
            threshold=self.dropout.threshold,
            is_backward="grad" in tensors,
            scale=self.dropout.scale,
            **tensors,
        )
        if dbias is not None and sums is not None:
            self.add_to_bias(dbias, sums.sum(0))

    def groups(self, long: _Long) -> Iterator[range]:
        """The heads of each tile of a long row."""
        for first in range(0, self.heads, long.heads):
            yield range(first, min(first + long.heads, self.heads))

    def gather(self, x: Tensor, tokens: Tensor, heads: range) -> Tensor:
        """Tokens (L,) of x (N, H, K) as (h, L, K)."""
        tile = x.new_empty(len(heads), len(tokens), self.width)
        self.kernels.gather_heads(x, tile, tokens, heads.start)
        return tile

    def put(self, tile: Tensor, x: Tensor, tokens: Tensor, heads: range) -> None:
        """Write (h, L, K) to tokens (L,) of x (N, H, K)."""
        self.kernels.gather_heads(x, tile, tokens, heads.start, is_back=True)

    def weigh_tile(
        self,
        is_backward: bool,
        long: _Long,
        heads: range,
        part: slice,
        bias: Tensor | None,
        seen: int,
        **tensors: Tensor | None,
    ) -> None:
        """What stands between the products of a tile of a long row."""
        length, distances = len(long.queries), 0 if bias is None else bias.shape[1]
        self.kernels.weigh_tile(
            is_backward,
            bias=bias,
            count=long.count,
            is_bf16=self.q.dtype == torch.bfloat16,
            heads=len(heads),
            first_head=heads.start,
            queries=part.stop - part.start,
            keys=seen,
            distances=distances,
            start=distances // 2 - length + 1 + part.start,
            last_query=length - 1 - part.start,
            threshold=self.dropout.threshold,
            scale=self.dropout.scale,
            row_key=None if self.row_keys is None else self.row_keys[long.row],
            **tensors,
        )

    def seen(self, long: _Long, part: slice) -> int:
        """Keys that a tile looks at: where attention is causal, none after its last query but for the first tile."""
        num_keys = len(long.keys)
        return num_keys if not self.causal or part.start == 0 else min(num_keys, len(long.queries) - part.start)

    def weigh(
        self, q: Tensor, k: Tensor, long: _Long, heads: range, part: slice, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Weights (h, t, M) of a tile, and what dropout leaves of them; q (h, t, K) last query first, k (h, M, K)."""
        weights = torch.bmm(q, k.transpose(1, 2))
        used = weights if self.row_keys is None else torch.empty_like(weights)
        self.weigh_tile(False, long, heads, part, bias, k.shape[1], scores=weights, weights=weights, used=used)
        return weights, used

    def attend_long(self, long: _Long, out: Tensor) -> None:
        """Write the output of a long row."""
        bias = self.widened(long.reach)
        for heads in self.groups(long):
            k, v = self.gather(self.k, long.keys, heads), self.gather(self.v, long.keys, heads)
            for part in long.parts():
                seen, tokens = self.seen(long, part), long.queries[part]
                q = self.gather(self.q, tokens, heads)
                _, used = self.weigh(q, k[:, :seen], long, heads, part, bias)
                self.put(torch.bmm(used, v[:, :seen]), out, tokens, heads)

    def attend_long_back(self, long: _Long, grad: Tensor, grads: tuple[Tensor, ...], dbias: Tensor | None) -> None:
        """Write the gradients of a long row's q, k and v, and add that of its bias (H, R)."""
        bias = self.widened(long.reach)
        sums = None if dbias is None else dbias.new_zeros(len(dbias), 2 * long.reach - 1)
        for heads in self.groups(long):
            k, v = self.gather(self.k, long.keys, heads), self.gather(self.v, long.keys, heads)
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            for part in long.parts():
                seen, tokens = self.seen(long, part), long.queries[part]
                q, g = self.gather(self.q, tokens, heads), self.gather(grad, tokens, heads)
                weights, used = self.weigh(q, k[:, :seen], long, heads, part, bias)
                dweights = torch.bmm(g, v[:, :seen].transpose(1, 2))
                _add_product(dv, used.transpose(1, 2), g, part.start == 0)
                tensors = {"scores": dweights, "weights": weights, "dweights": dweights, "dbias": sums}
                self.weigh_tile(True, long, heads, part, bias, seen, **tensors)
                self.put(torch.bmm(dweights, k[:, :seen]), grads[0], tokens, heads)
                _add_product(dk, dweights.transpose(1, 2), q, part.start == 0)
            self.put(dk, grads[1], long.keys, heads)
            self.put(dv, grads[2], long.keys, heads)
        if dbias is not None and sums is not None:
            self.add_to_bias(dbias, sums)


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Write left right into the first places of total (h, M, K), or add it: the first tile of a row sees all keys."""
    if is_first:
        torch.bmm(left, right, out=total)
    else:
        total[:, : left.shape[1]].baddbmm_(left, right)


def _room(x: Tensor, rows: Rows) -> Tensor:
    """(N, H, K), zero behind the last row."""
    room = torch.empty_like(x)
    room[rows.row_tokens :] = 0
    return room


class CompiledAttention(torch.autograd.Function):
    """Arguments as `model.attention.attend`. Memory: q, k, v kept; while running a tile of a long row twice, in forward
    once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        rows: tuple[Rows, Rows],
        causal: bool,
        dropout: Dropout,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        ctx.rows, ctx.causal, ctx.dropout = rows, causal, dropout
        call, out = _Call(q, k, v, bias, rows, causal, dropout), _room(q, rows[0])
        call.attend_short({"out": out})
        for long in call.long:
            call.attend_long(long, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, bias = ctx.saved_tensors
        call, grad = _Call(q, k, v, bias, ctx.rows, ctx.causal, ctx.dropout), grad.contiguous()
        dq, dk, dv = (_room(x, rows) for x, rows in zip((q, k, v), (ctx.rows[0], *[ctx.rows[1]] * 2), strict=True))
        dbias = None
        if bias is not None and ctx.needs_input_grad[3]:
            dbias = torch.zeros_like(bias, dtype=torch.float32)
        call.attend_short({"grad": grad, "dq": dq, "dk": dk, "dv": dv}, dbias)
        for long in call.long:
            call.attend_long_back(long, grad, (dq, dk, dv), dbias)
        return dq, dk, dv, None if dbias is None else dbias.to(bias.dtype), None, None, None
