"""How does T5 attend, with its learned position bias, in memory linear in the length?

T5's bias depends only on the distance between key and query, so it is held as a vector over distances (H, R), never as a
matrix. Queries are processed in tiles: a tile's scores (H, t, M) over the whole key range fit into cache, its softmax is
complete, and backward recomputes it; nothing is kept but q, k and v. One backward yields dq, dk, dv and the gradient of
the distance vector together. Causality is the value -inf at positive distances. Rows lie end to end and attend to
themselves alone (`model.rows`), so there is no padding and no mask.

Shapes: N query tokens, M key tokens of a row, H heads, K d_kv, R distances, t queries of a tile.
Source: position buckets: Raffel et al. 2020, section 2.1; recompute in tiles: Rabe and Staats 2021 (arXiv 2112.05682).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import T5ModelConfig
from model.dropout import _MIX_1, Dropout, mix, random_words
from model.layers import Linear
from model.rows import Rows
from model.tiles import Group, Layout, layout_of


def position_buckets(distances: Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Map distances (key position - query position) to buckets: exact when near, logarithmic when far.

    Args:
        distances: (R,) int64.
    Returns:
        (R,) int64 in [0, num_buckets).
    """
    offset = torch.zeros_like(distances)
    if bidirectional:
        num_buckets //= 2
        offset = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = num_buckets // 2
    # the formula in fp32, as the published checkpoints saw it
    ratio = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distances < exact, distances, far)


class PositionBias(nn.Module):
    """The learned bias: a table of one number per bucket and head."""

    def __init__(self, config: T5ModelConfig, bidirectional: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.relative_attention_num_buckets, config.num_heads))
        self.bidirectional, self.max_distance = bidirectional, config.relative_attention_max_distance

    def forward(self, longest: int) -> Tensor:
        """The bias of each distance from -(longest - 1) to longest - 1: (H, 2 longest - 1), fp32."""
        distances = torch.arange(1 - longest, longest, device=self.table.device)
        buckets = position_buckets(distances, self.bidirectional, self.table.shape[0], self.max_distance)
        bias = self.table.float()[buckets].t()  # (H, R)
        return bias if self.bidirectional else bias.masked_fill(distances > 0, -math.inf)


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
        blank = None if group.blank is None else _blank(group.blank[:, :keys], scores.dtype)
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


def _blank(blank: Tensor, dtype: torch.dtype) -> Tensor:
    """(b, M) bool -> (b, 1, 1, M): -inf where there is no key, else 0."""
    return torch.zeros(blank.shape, dtype=dtype, device=blank.device).masked_fill_(blank, -math.inf)[:, None, None]


class _TiledAttention(torch.autograd.Function):
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
        _add_product(dvt, used.transpose(1, 2), gt, part.start == 0)
        dscores = scores  # its own content is not needed any more
        torch.ops.aten._softmax_backward_data.out(dweights, weights, -1, weights.dtype, grad_input=dscores)
        torch.bmm(dscores, kt[:, :seen], out=tiles.room_of(dq, group, part))
        _add_product(dkt, dscores.transpose(1, 2), qt, part.start == 0)
        if dbias is not None:
            start, width = tiles.window_start(group, part), qt.shape[1] + seen - 1
            spread = dscores.view(group.num_rows, tiles.heads, -1, seen)
            one = spread[0] if group.num_rows == 1 else spread.sum(0, dtype=dbias.dtype)
            dbias[:, start : start + width] += tiles.scratch.sum_diagonals(one)


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Write left right into the first places of total (b H, M, K), or add it: the first tile of a group sees all keys."""
    if is_first:
        torch.bmm(left, right, out=total)
    else:
        total[:, : left.shape[1]].baddbmm_(left, right)


def _widened(bias: Tensor | None, layout: Layout, dtype: torch.dtype) -> Tensor | None:
    """The bias (H, R) in the dtype of the scores, with room on both sides for the distances of padded rows."""
    if bias is None:
        return None
    longest = max(max(group.num_queries, group.num_keys) for group in layout.groups)
    return F.pad(bias.detach().to(dtype), (max(0, longest - bias.shape[1] // 2 - 1),) * 2)


def attend_padded(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows], causal: bool, dropout: Dropout
) -> Tensor:
    """The same as `attend` through padded rows and torch's fused kernels: the way for CUDA, where a loop over rows is slow.

    Memory: a bias of H x longest^2, and with unequal rows a mask of the same shape for each row.
    Nothing is dropped here: torch would draw other masks when a block is recomputed, and the gradient would be of them.
    """
    assert not dropout.active
    query_rows, key_rows = rows
    qp, kp, vp = query_rows.pad(q), key_rows.pad(k), key_rows.pad(v)  # (B, L, H, K)
    longest, keys = query_rows.longest, key_rows.longest
    mask = None
    if bias is not None:
        zero = bias.shape[1] // 2
        places = torch.arange(keys, device=q.device) - torch.arange(longest, device=q.device)[:, None] + zero
        mask = bias[:, places].to(q.dtype)  # (H, L, M)
    if len(set(key_rows.lengths)) > 1:
        lengths = torch.tensor(key_rows.lengths, device=q.device)
        beyond = torch.arange(keys, device=q.device) >= lengths[:, None]  # (B, M)
        blank = torch.zeros_like(beyond, dtype=q.dtype).masked_fill_(beyond, -math.inf)[:, None, None, :]
        mask = blank.expand(-1, -1, longest, -1) if mask is None else mask + blank
    elif mask is not None:
        mask = mask.expand(len(query_rows.lengths), -1, -1, -1)
    out = F.scaled_dot_product_attention(qp.transpose(1, 2), kp.transpose(1, 2), vp.transpose(1, 2), mask, scale=1.0)
    return query_rows.flatten(out.transpose(1, 2))


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows], causal: bool, dropout: Dropout
) -> Tensor:
    """softmax(q k^T + bias) v, row by row; T5 does not scale the scores.

    Args:
        q: (N, H, K) of the query rows; k, v: (N', H, K) of the key rows.
        bias: (H, R), one number per distance, distance 0 in the middle, R odd and at least 2 longest - 1; or None.
        rows: layout of queries and of keys.
        causal: whether bias holds -inf at positive distances, so that those keys need not be computed.
        dropout: of the attention weights.
    Returns:
        (N, H, K).
    """
    way = attend_padded if q.device.type == "cuda" and not dropout.active else _TiledAttention.apply
    return way(q, k, v, bias, rows, causal, dropout)


class Attention(nn.Module):
    """Multi-head attention of T5: four matrices without bias; H * K need not be D."""

    def __init__(self, config: T5ModelConfig) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.num_heads, self.d_kv = config.num_heads, config.d_kv
        self.q = Linear(config.d_model, inner)
        self.k = Linear(config.d_model, inner)
        self.v = Linear(config.d_model, inner)
        self.o = Linear(inner, config.d_model)

    def heads(self, x: Tensor) -> Tensor:
        """(N, H K) -> (N, H, K), a view."""
        return x.view(-1, self.num_heads, self.d_kv)

    def forward(
        self, x: Tensor, source: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows], causal: bool, dropout: Dropout
    ) -> Tensor:
        """Queries from x (N, D), keys and values from source (N', D): (N, D)."""
        q = self.heads(self.q(x, dropout.of_adapter(0)))
        k = self.heads(self.k(source, dropout.of_adapter(1, rows[1])))
        v = self.heads(self.v(source, dropout.of_adapter(2, rows[1])))
        out = attend(q, k, v, bias, rows, causal, dropout)
        return self.o(out.reshape(-1, self.num_heads * self.d_kv), dropout.of_adapter(3))
