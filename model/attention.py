"""How does T5 attend, with its learned position bias, in memory linear in the length?

T5's bias depends only on the distance between key and query, so it is held as a vector over distances (H, R), never as a
matrix. Queries are visited in tiles: a tile's scores (H, t, M) over the whole key range fit into cache, its softmax is
complete, and backward recomputes it; nothing is kept but q, k and v. One backward yields dq, dk, dv and the gradient of
the distance vector together. Causality is the value -inf at positive distances. Rows lie end to end and attend to
themselves alone (`model.rows`), so there is no padding and no mask.

Shapes: N query tokens, M key tokens of a row, H heads, K d_kv, R distances, t queries of a tile.
Source: position buckets: Raffel et al. 2020, section 2.1; recompute in tiles: Rabe and Staats 2021 (arXiv 2112.05682).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import T5ModelConfig
from model.dropout import _MIX_1, Dropout, mix, random_words
from model.layers import Linear
from model.rows import Rows

TILE_ELEMENTS = 512 * 1024  # scores of one tile: 2 MB in fp32, so that its few buffers stay in the second-level cache


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


@dataclass(frozen=True)
class _Tile:
    """Queries i0 to i1 of one row, and the keys that they see: slices into the flat tensors."""

    row: int
    i0: int
    i1: int
    num_keys: int
    queries: slice
    keys: slice


def _tile_queries(num_heads: int, num_keys: int) -> int:
    """Queries of a tile over `num_keys` keys."""
    return max(1, TILE_ELEMENTS // (num_heads * num_keys))


def _tiles(query_rows: Rows, key_rows: Rows, num_heads: int, causal: bool) -> Iterator[_Tile]:
    for row, length in enumerate(query_rows.lengths):
        keys = key_rows.lengths[row]
        step = _tile_queries(num_heads, keys)
        for i0 in range(0, length, step):
            i1 = min(i0 + step, length)
            seen = i1 if causal else keys
            start, key_start = query_rows.starts[row], key_rows.starts[row]
            yield _Tile(row, i0, i1, seen, slice(start + i0, start + i1), slice(key_start, key_start + seen))


class _Scratch:
    """Buffers for the scores of tiles, made once a call and used for every tile: fresh memory for each would cost more
    than the arithmetic on it."""

    def __init__(self, like: Tensor, num_heads: int, query_rows: Rows, key_rows: Rows, count: int) -> None:
        lengths = zip(query_rows.lengths, key_rows.lengths, strict=True)
        largest = max(min(length, _tile_queries(num_heads, keys)) * keys for length, keys in lengths)
        self.buffers = [like.new_empty(num_heads * largest) for _ in range(count)]
        self._skewed: Tensor | None = None

    def shaped(self, heads: int, tile: _Tile) -> list[Tensor]:
        """The buffers as (H, t, M)."""
        shape = (heads, tile.i1 - tile.i0, tile.num_keys)
        return [buffer[: math.prod(shape)].view(shape) for buffer in self.buffers]

    def sum_diagonals(self, matrix: Tensor) -> Tensor:
        """Sum (H, t, M), last query first, over equal distances: (H, t + M - 1), the smallest distance first."""
        heads, t, keys = matrix.shape
        width = t + keys
        if self._skewed is None or self._skewed.shape != (heads, t, width):
            self._skewed = matrix.new_zeros(heads, t, width)  # between the diagonals it stays zero
        # row r is written r places further to the right, so that equal distances stand in one column
        self._skewed.as_strided((heads, t, keys), (t * width, width + 1, 1), 0).copy_(matrix)
        return self._skewed.sum(1)[:, : width - 1]


def _backwards(x: Tensor, part: slice) -> Tensor:
    """Tokens of a tile as (H, t, K), the last one first."""
    return x[part].flip(0).transpose(0, 1)


def _put(x: Tensor, part: slice, values: Tensor) -> None:
    """The inverse: write (H, t, K), last token first, back to its place."""
    x[part] = values.transpose(0, 1).flip(0)


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, tile: _Tile, scores: Tensor, weights: Tensor) -> None:
    """Fill `weights` (H, t, M) with the softmax of a tile; q (H, t, K) last query first, k (H, M, K), bias (H, R)."""
    if bias is None:
        torch.bmm(q, k.transpose(1, 2), out=scores)
    else:
        zero = bias.shape[1] // 2
        window = bias[:, zero - tile.i1 + 1 : zero - tile.i0 + tile.num_keys]
        # each query sees the window one place further: with the last query first, a view of overlapping rows
        torch.baddbmm(window.unfold(1, tile.num_keys, 1), q, k.transpose(1, 2), out=scores)
    torch.ops.aten._softmax.out(scores, -1, False, out=weights)


def _kept(dropout: Dropout, row_keys: Tensor, tile: _Tile, num_heads: int) -> Tensor:
    """(H, t, M) bool, last query first: the attention weights that dropout leaves; a function of (row, head, query, key)."""
    device = row_keys.device
    queries = torch.arange(tile.i0, tile.i1, device=device).flip(0)
    places = torch.arange(num_heads, device=device)[:, None] * (1 << 32) + queries
    return random_words(mix(row_keys[tile.row] + places * _MIX_1), tile.num_keys) >= dropout.threshold


class _TiledAttention(torch.autograd.Function):
    """Arguments as `attend`. Memory: q, k, v kept; a few buffers of TILE_ELEMENTS while running."""

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
        out, heads = torch.empty_like(q), q.shape[1]
        bias = None if bias is None else bias.to(q.dtype)
        row_keys = dropout.row_keys() if dropout.active else None
        scratch = _Scratch(q, heads, rows[0], rows[1], 2)
        for tile in _tiles(rows[0], rows[1], heads, causal):
            scores, weights = scratch.shaped(heads, tile)
            kt, vt = k[tile.keys].transpose(0, 1), v[tile.keys].transpose(0, 1)
            _weights(_backwards(q, tile.queries), kt, bias, tile, scores, weights)
            if row_keys is not None:
                weights.mul_(_kept(dropout, row_keys, tile, heads)).mul_(dropout.scale)
            _put(out, tile.queries, torch.bmm(weights, vt))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, bias = ctx.saved_tensors
        dropout, heads = ctx.dropout, q.shape[1]
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dbias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[3] else None
        bias = None if bias is None else bias.to(q.dtype)
        row_keys = dropout.row_keys() if dropout.active else None
        scratch = _Scratch(q, heads, ctx.rows[0], ctx.rows[1], 3)
        for tile in _tiles(ctx.rows[0], ctx.rows[1], heads, ctx.causal):
            scores, weights, dweights = scratch.shaped(heads, tile)
            qt, gt = _backwards(q, tile.queries), _backwards(grad, tile.queries)
            kt, vt = k[tile.keys].transpose(0, 1), v[tile.keys].transpose(0, 1)
            _weights(qt, kt, bias, tile, scores, weights)
            torch.bmm(gt, vt.transpose(1, 2), out=dweights)
            used = weights
            if row_keys is not None:
                kept = _kept(dropout, row_keys, tile, heads)
                used = torch.mul(weights, kept, out=scores).mul_(dropout.scale)
                dweights.mul_(kept).mul_(dropout.scale)
            dv[tile.keys].transpose(0, 1).baddbmm_(used.transpose(1, 2), gt)
            dscores = scores  # its own content is not needed any more
            torch.ops.aten._softmax_backward_data.out(dweights, weights, -1, weights.dtype, grad_input=dscores)
            _put(dq, tile.queries, torch.bmm(dscores, kt))
            dk[tile.keys].transpose(0, 1).baddbmm_(dscores.transpose(1, 2), qt)
            if dbias is not None:
                first = dbias.shape[1] // 2 - tile.i1 + 1
                width = tile.i1 - tile.i0 + tile.num_keys - 1
                dbias[:, first : first + width] += scratch.sum_diagonals(dscores)
        return dq, dk, dv, dbias, None, None, None


def attend_padded(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows], causal: bool, dropout: Dropout
) -> Tensor:
    """The same as `attend` through padded rows and torch's fused kernels: the way for CUDA, where a loop over rows is slow.

    Memory: a bias of H x longest^2, and with unequal rows a mask of the same shape for each row.
    Nothing is dropped here: torch would draw other masks when a block is run again, and the gradient would be of them.
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
        causal: whether bias holds -inf at positive distances, so that those keys need not be visited.
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
