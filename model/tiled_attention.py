"""How does attention compute where torch's own operations do it, on CPUs without compiled kernels and on Macs?

Queries are processed in tiles: a tile's scores (H, t, M) over the whole key range fit into cache, its softmax is complete,
and backward recomputes it; nothing is kept but q, k and v. One backward yields dq, dk, dv and the gradient of the
distance vector together. Rows of like length share a tile (`model.tiles`).

Shapes: N query tokens, M key tokens of a row, H heads, K d_kv, R distances, t queries of a tile, b rows of a group.
Source: recompute in tiles: Rabe and Staats 2021 (arXiv 2112.05682).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.dropout import _MIX_1, Dropout, mix, random_words
from model.rows import Rows
from model.tiles import Group, Layout, add_product, layout_of


class _Scratch:
    """Buffers for the scores of tiles, made once a call and used for every tile: fresh memory for each would cost more
    than the arithmetic on it."""

    def __init__(self, like: Tensor, num_heads: int, layout: Layout, count: int) -> None:
        largest = max(group.num_rows * group.block * group.num_keys for group in layout.groups)
        self.buffers = [like.new_empty(num_heads * largest) for _ in range(count)]
        self._skewed: Tensor | None = None

    def shaped(self, *shape: int) -> list[Tensor]:
        """The buffers as (b H, t, M)."""
        return [buffer[: math.prod(shape)].view(shape) for buffer in self.buffers]

    def sum_diagonals(self, matrix: Tensor) -> Tensor:
        """Sum (H, t, M), last query first, over equal distances: (H, t + M - 1) fp32, the smallest distance first."""
        heads, t, keys = matrix.shape
        width = t + keys
        if self._skewed is None or self._skewed.shape != (heads, t, width):
            self._skewed = matrix.new_zeros(heads, t, width)  # between the diagonals it stays zero
        # row r is written r places further to the right, so that equal distances stand in one column
        self._skewed.as_strided((heads, t, keys), (t * width, width + 1, 1), 0).copy_(matrix)
        return self._skewed.sum(1, dtype=torch.promote_types(matrix.dtype, torch.float32))[:, : width - 1]


class _Tiles:
    """One attention over all tiles of a layout: what forward and backward share.

    Args:
        q, k, v: (N, H, K), (N', H, K). bias: (H, R) in the dtype of q, wide enough for padded rows, or None.
        causal: whether keys after the last query of a tile are left out.
        count: buffers for scores.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, layout: Layout, causal: bool, dropout: Dropout, count: int
    ) -> None:  # fmt: skip
        self.heads, self.width = q.shape[1:]
        self.q, self.k, self.v = (x.reshape(-1, self.width) for x in (q, k, v))
        self.bias, self.layout, self.causal, self.dropout = bias, layout, causal, dropout
        self.zero = 0 if bias is None else bias.shape[1] // 2
        self.scratch = _Scratch(q, self.heads, layout, count)
        self.row_keys = dropout.row_keys() if dropout.active else None
        self._heads = torch.arange(self.heads, dtype=torch.int32, device=q.device)

    def gather(self, flat: Tensor, tokens: Tensor) -> Tensor:
        """Tokens (b, L) of flat (N H, K) as (b H, L, K)."""
        index = tokens[:, None] * self.heads + self._heads[:, None]
        return flat.index_select(0, index.flatten()).view(-1, tokens.shape[1], self.width)

    def padded(self, places: int) -> Tensor:
        """Room for the outputs of all groups, (places H + 1, K); the last one is what fillers get."""
        room = self.q.new_empty(places * self.heads + 1, self.width)
        room[-1] = 0
        return room

    def collect(self, room: Tensor, homes: Tensor) -> Tensor:
        """From padded places back to tokens: (N, H, K)."""
        index = homes[:, :1] + self._heads * homes[:, 1:]
        return room.index_select(0, index.flatten()).view(len(homes), self.heads, self.width)

    def room_of(self, room: Tensor, group: Group, part: slice) -> Tensor:
        """Where the queries `part` of a group are written: (b H, t, K)."""
        first = (group.start + group.num_rows * part.start) * self.heads
        count = group.num_rows * self.heads * (part.stop - part.start)
        return room[first : first + count].view(-1, part.stop - part.start, self.width)

    def keys_room_of(self, room: Tensor, group: Group) -> Tensor:
        """Where a group's keys are written: (b H, M, K)."""
        first, count = group.key_start * self.heads, group.num_rows * self.heads * group.num_keys
        return room[first : first + count].view(-1, group.num_keys, self.width)

    def seen(self, group: Group, part: slice) -> int:
        """Keys that the queries `part` look at: of all but the first tile none after them where attention is causal."""
        if not self.causal or part.start == 0:
            return group.num_keys
        return min(group.num_keys, group.num_queries - part.start)

    def window_start(self, group: Group, part: slice) -> int:
        """Where the bias of the first of the queries `part` begins."""
        return self.zero - group.num_queries + 1 + part.start

    def weigh(self, q: Tensor, k: Tensor, group: Group, part: slice, scores: Tensor, weights: Tensor) -> None:
        """Fill `weights` (b H, t, M) with the softmax of a tile; q (b H, t, K) last query first, k (b H, M, K)."""
        rows, keys = group.num_rows, k.shape[1]
        blank = None
        if group.blank is not None:  # (b, M) bool -> (b, 1, 1, M): -inf where there is no key, else 0
            blank = scores.new_zeros((rows, 1, 1, keys)).masked_fill_(group.blank[:, None, None, :keys], -math.inf)
        if self.bias is not None:
            start = self.window_start(group, part)
            # each query sees the bias one place further: a view of overlapping rows
            window = self.bias[:, start : start + q.shape[1] + keys - 1].unfold(1, keys, 1)
            spread = scores.view(rows, self.heads, -1, keys)
            if blank is None:
                spread.copy_(window)
            else:
                torch.add(window, blank, out=spread)
            scores.baddbmm_(q, k.transpose(1, 2))
        else:
            torch.bmm(q, k.transpose(1, 2), out=scores)
            if blank is not None:
                scores.view(rows, -1, keys).add_(blank.view(rows, 1, keys))
        torch.ops.aten._softmax.out(scores, -1, False, out=weights)

    def kept(self, group: Group, part: slice, keys: int) -> Tensor | None:
        """(b H, t, M) bool: the weights that dropout leaves, a function of (row, head, query, key); None: all."""
        if self.row_keys is None:
            return None
        last = group.num_queries - 1
        queries = torch.arange(last - part.start, last - part.stop, -1, device=self.row_keys.device)
        places = self._heads.long()[:, None] * (1 << 32) + queries  # (H, t)
        mixed = mix(self.row_keys[group.rows][:, None, None] + places * _MIX_1)
        return (random_words(mixed, keys) >= self.dropout.threshold).view(-1, len(queries), keys)

    def drop(self, weights: Tensor, kept: Tensor | None, out: Tensor) -> Tensor:
        """Weights without those that are dropped, written to `out`; the weights themselves where none is."""
        if kept is None:
            return weights
        return torch.mul(weights, kept, out=out).mul_(self.dropout.scale)


class TiledAttention(torch.autograd.Function):
    """Arguments as `attend`. Memory: q, k, v kept; while running, the padded output and a few buffers of a tile's size."""

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
        layout = layout_of(rows[0], rows[1], q.shape[1], q.shape[2], q.device)
        tiles = _Tiles(q, k, v, _widened(bias, layout, q.dtype), layout, causal, dropout, 2)
        room = tiles.padded(layout.num_queries)
        for group in layout.groups:
            kt, vt = tiles.gather(tiles.k, group.keys), tiles.gather(tiles.v, group.keys)
            for part in group.blocks():
                seen = tiles.seen(group, part)
                qt = tiles.gather(tiles.q, group.queries[:, part])
                scores, weights = tiles.scratch.shaped(len(qt), qt.shape[1], seen)
                tiles.weigh(qt, kt[:, :seen], group, part, scores, weights)
                weights = tiles.drop(weights, tiles.kept(group, part, seen), scores)
                torch.bmm(weights, vt[:, :seen], out=tiles.room_of(room, group, part))
        return tiles.collect(room, layout.query_homes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, bias = ctx.saved_tensors
        query_rows, key_rows = ctx.rows
        layout = layout_of(query_rows, key_rows, q.shape[1], q.shape[2], q.device)
        wide, dbias = _widened(bias, layout, q.dtype), None
        tiles = _Tiles(q, k, v, wide, layout, ctx.causal, ctx.dropout, 3)
        if wide is not None and ctx.needs_input_grad[3]:
            dbias = torch.zeros_like(wide, dtype=torch.promote_types(q.dtype, torch.float32))
        grad = grad.reshape(-1, q.shape[2])
        dq, dk, dv = (tiles.padded(count) for count in (layout.num_queries, layout.num_keys, layout.num_keys))
        for group in layout.groups:
            _backward_group(tiles, group, grad, dq, dk, dv, dbias)
        dq = tiles.collect(dq, layout.query_homes)
        dk, dv = tiles.collect(dk, layout.key_homes), tiles.collect(dv, layout.key_homes)
        if dbias is not None:
            margin = (dbias.shape[1] - bias.shape[1]) // 2
            dbias = dbias[:, margin : margin + bias.shape[1]].to(bias.dtype)
        return dq, dk, dv, dbias, None, None, None


def _backward_group(
    tiles: _Tiles, group: Group, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dbias: Tensor | None
) -> None:
    """Write the gradients of a group's padded queries, keys and values, and add that of its bias."""
    kt, vt = tiles.gather(tiles.k, group.keys), tiles.gather(tiles.v, group.keys)
    dkt, dvt = tiles.keys_room_of(dk, group), tiles.keys_room_of(dv, group)
    for part in group.blocks():
        seen = tiles.seen(group, part)
        tokens = group.queries[:, part]
        qt, gt = tiles.gather(tiles.q, tokens), tiles.gather(grad, tokens)
        if group.live is not None:  # a place without a query has no gradient
            gt.view(group.num_rows, tiles.heads, -1, tiles.width).mul_(group.live[:, None, part, None])
        scores, weights, dweights = tiles.scratch.shaped(len(qt), qt.shape[1], seen)
        tiles.weigh(qt, kt[:, :seen], group, part, scores, weights)
        torch.bmm(gt, vt[:, :seen].transpose(1, 2), out=dweights)
        kept = tiles.kept(group, part, seen)
        used, dweights = tiles.drop(weights, kept, scores), tiles.drop(dweights, kept, dweights)
        add_product(dvt, used.transpose(1, 2), gt, part.start == 0)
        dscores = scores  # its own content is not needed any more
        torch.ops.aten._softmax_backward_data.out(dweights, weights, -1, weights.dtype, grad_input=dscores)
        torch.bmm(dscores, kt[:, :seen], out=tiles.room_of(dq, group, part))
        add_product(dkt, dscores.transpose(1, 2), qt, part.start == 0)
        if dbias is not None:
            start, width = tiles.window_start(group, part), qt.shape[1] + seen - 1
            spread = dscores.view(group.num_rows, tiles.heads, -1, seen)
            one = spread[0] if group.num_rows == 1 else spread.sum(0, dtype=dbias.dtype)
            dbias[:, start : start + width] += tiles.scratch.sum_diagonals(one)


def _widened(bias: Tensor | None, layout: Layout, dtype: torch.dtype) -> Tensor | None:
    """The bias (H, R) in the dtype of the scores, with room on both sides for the distances of padded rows."""
    if bias is None:
        return None
    longest = max(max(group.num_queries, group.num_keys) for group in layout.groups)
    return F.pad(bias.detach().to(dtype), (max(0, longest - bias.shape[1] // 2 - 1),) * 2)
