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
        rows: (n,) int64, the number of each in its micro-batch. spans: where they begin and how long they are, (n,)
            int32 each.
    """

    rows: Tensor
    spans: dict[str, Tensor]
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
    index = torch.tensor(members)
    spans = {name: torch.tensor(numbers, dtype=torch.int32)[index] for name, numbers in values.items()}
    longest = max(int(spans["query_lengths"].max()), int(spans["key_lengths"].max()))
    return _Short(index, spans, longest)


def _long(rows: tuple[Rows, Rows], row: int, heads: int) -> _Long:
    num_queries = rows[0].lengths[row]
    num_keys = rows[1].lengths[row]
    padded_queries, padded_keys, block, tile_heads = long_tile(heads, num_queries, num_keys)
    queries = np.full(padded_queries, -1, np.int32)
    keys = np.full(padded_keys, -1, np.int32)
    queries[:num_queries] = np.arange(num_queries) + rows[0].starts[row]
    keys[:num_keys] = np.arange(num_keys) + rows[1].starts[row]
    queries = np.ascontiguousarray(queries[::-1])
    return _Long(row, torch.from_numpy(queries), torch.from_numpy(keys), num_keys, block, tile_heads)


class _CompiledCall:
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
        compiled = kernels()
        assert compiled is not None
        self.kernels: Kernels = compiled
        self.q = q
        self.k = k
        self.v = v
        self.causal = causal
        self.dropout = dropout
        self.heads, self.width = q.shape[1:]
        self.short, self.long = _split(rows, self.heads)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.dbias: Tensor | None = None
        self.row_keys = dropout.row_keys() if dropout.active else None

    def widened(self, reach: int) -> Tensor | None:
        """The bias of distances from -(reach - 1) to reach - 1: cut, or filled up for places without a token."""
        if self.bias is None:
            return None
        return F.pad(self.bias, (reach - 1 - self.bias.shape[1] // 2,) * 2).contiguous()

    def bias_sums(self, parts: int, reach: int) -> Tensor | None:
        """Zeros for the gradient of a `widened` bias in parts of the rows; None where the bias needs no gradient."""
        return None if self.dbias is None else self.dbias.new_zeros(parts, self.heads, 2 * reach - 1)

    def add_to_bias(self, sums: Tensor | None) -> None:
        """Add `bias_sums` to the gradient of the bias (H, R)."""
        if self.dbias is not None and sums is not None:
            zero = self.dbias.shape[1] // 2
            other = sums.shape[2] // 2
            reach = min(zero, other)
            self.dbias[:, zero - reach : zero + reach + 1] += sums.sum(0)[:, other - reach : other + reach + 1]

    def attend_short(self, tensors: dict[str, Tensor]) -> None:
        """All short rows; `tensors`: out, or grad, dq, dk and dv. Adds to the gradient of the bias."""
        short = self.short
        if short is None:
            return
        # Gradients of the bias are summed apart in parts of the rows, whatever the number of threads.
        parts = min(PARTS, len(short.rows))
        sums = self.bias_sums(parts, short.longest)
        self.kernels.attend_rows(
            q=self.q,
            k=self.k,
            v=self.v,
            bias=self.widened(short.longest),
            dbias=sums,
            **short.spans,
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
        self.add_to_bias(sums)

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
        num_keys: int,
        **tensors: Tensor | None,
    ) -> None:
        """What stands between the products of a tile of a long row."""
        length = len(long.queries)
        distances = 0 if bias is None else bias.shape[1]
        self.kernels.weigh_tile(
            is_backward,
            bias=bias,
            count=long.count,
            is_bf16=self.q.dtype == torch.bfloat16,
            heads=len(heads),
            first_head=heads.start,
            queries=part.stop - part.start,
            keys=num_keys,
            distances=distances,
            start=distances // 2 - length + 1 + part.start,
            last_query=length - 1 - part.start,
            threshold=self.dropout.threshold,
            scale=self.dropout.scale,
            row_key=None if self.row_keys is None else self.row_keys[long.row],
            **tensors,
        )

    def visible_keys(self, long: _Long, part: slice) -> int:
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
            k = self.gather(self.k, long.keys, heads)
            v = self.gather(self.v, long.keys, heads)
            for part in long.parts():
                count = self.visible_keys(long, part)
                tokens = long.queries[part]
                q = self.gather(self.q, tokens, heads)
                _, used = self.weigh(q, k[:, :count], long, heads, part, bias)
                self.put(torch.bmm(used, v[:, :count]), out, tokens, heads)

    def attend_long_back(self, long: _Long, grad: Tensor, grads: tuple[Tensor, ...]) -> None:
        """Write the gradients of a long row's q, k and v, and add that of its bias."""
        bias = self.widened(long.reach)
        sums = self.bias_sums(1, long.reach)
        for heads in self.groups(long):
            k = self.gather(self.k, long.keys, heads)
            v = self.gather(self.v, long.keys, heads)
            dk = torch.empty_like(k)
            dv = torch.empty_like(v)
            for part in long.parts():
                count = self.visible_keys(long, part)
                tokens = long.queries[part]
                q = self.gather(self.q, tokens, heads)
                dout = self.gather(grad, tokens, heads)
                weights, used = self.weigh(q, k[:, :count], long, heads, part, bias)
                dweights = torch.bmm(dout, v[:, :count].transpose(1, 2))
                _add_product(dv, used.transpose(1, 2), dout, part.start == 0)
                tensors = {"scores": dweights, "weights": weights, "dweights": dweights, "dbias": sums}
                self.weigh_tile(True, long, heads, part, bias, count, **tensors)
                self.put(torch.bmm(dweights, k[:, :count]), grads[0], tokens, heads)
                _add_product(dk, dweights.transpose(1, 2), q, part.start == 0)
            self.put(dk, grads[1], long.keys, heads)
            self.put(dv, grads[2], long.keys, heads)
        self.add_to_bias(sums)


def _add_product(total: Tensor, first: Tensor, second: Tensor, is_first: bool) -> None:
    """Write first second into the first lines of total (h, M, K), or add it: the first tile of a row sees all keys."""
    if is_first:
        torch.bmm(first, second, out=total)
    else:
        total[:, : first.shape[1]].baddbmm_(first, second)


def _empty(x: Tensor, rows: Rows) -> Tensor:
    """The memory of a result (N, H, K), zero behind the last row."""
    result = torch.empty_like(x)
    result[rows.row_tokens :] = 0
    return result


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
        ctx.arguments = rows, causal, dropout
        call = _CompiledCall(q, k, v, bias, rows, causal, dropout)
        out = _empty(q, rows[0])
        call.attend_short({"out": out})
        for long in call.long:
            call.attend_long(long, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, bias = ctx.saved_tensors
        queries, keys = ctx.arguments[0]
        call = _CompiledCall(q, k, v, bias, *ctx.arguments)
        if ctx.needs_input_grad[3]:
            call.dbias = torch.zeros_like(bias, dtype=torch.float32)
        grad = grad.contiguous()
        dq = _empty(q, queries)
        dk = _empty(k, keys)
        dv = _empty(v, keys)
        call.attend_short({"grad": grad, "dq": dq, "dk": dk, "dv": dv})
        for long in call.long:
            call.attend_long_back(long, grad, (dq, dk, dv))
        return dq, dk, dv, call.dbias, None, None, None
