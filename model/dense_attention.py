"""Attention by torch's own operations, on every device without compiled kernels.

A group of rows of one length is a view of its tokens, so that attention is a product of whole matrices. Padded keys are
hidden by a mask. Where torch has its memory-efficient kernel it computes, with bias, mask and dropout inside; elsewhere
plain products do, and form the weights again on the way back. Above a bound of scores (`devices.base`) rows are taken
some at a time, and of a long row some queries, so that memory is linear in the length.

Shapes: N query tokens, N' key tokens, H heads, K d_kv, R distances, b rows, L their queries, t of them at a time, M
their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from devices.base import has_fused_attention, seed_generator, traits_of
from model.dropout import Dropout
from model.row_groups import tile_sizes
from model.rows import Rows

ALIGNED = 8  # Numbers of a head, and keys, that the memory-efficient kernel reads at a time.
NO_MASK_TYPE = 0  # The memory-efficient kernel is told nothing of causality: it stands in the bias.


def window(bias: Tensor, first: int, queries: int, keys: int) -> Tensor:
    """The bias over distances (H, R) of the queries from `first` on as a matrix (H, queries, keys)."""
    middle = bias.shape[1] // 2
    # The line of the last query comes first. A flip would keep the order of strides, and the kernel takes contiguous
    # lines only.
    lines = bias[:, middle - first - queries + 1 : middle - first + keys].unfold(1, keys, 1)
    return lines.index_select(1, torch.arange(queries - 1, -1, -1, device=bias.device))


def sum_over_distances(grad: Tensor, first: int, distances: int) -> Tensor:
    """The gradient of `window`: (H, queries, keys) -> (H, distances)."""
    heads, queries, keys = grad.shape
    # With as many zeros before each line as there are queries, and one more place a line, equal distances stand in one
    # column.
    shifted = grad.new_zeros(heads, queries * (queries + keys + 1))
    shifted[:, : queries * (queries + keys)].view(heads, queries, queries + keys)[:, :, queries:].copy_(grad)
    sums = shifted.view(heads, queries, queries + keys + 1).sum(1)
    start = distances // 2 - first - queries  # The place of the first column's distance.
    low = max(0, start)
    high = min(distances, start + sums.shape[1])
    whole = sums.new_zeros(heads, distances)
    whole[:, low:high] = sums[:, low - start : high - start]
    return whole


class BiasMatrix(torch.autograd.Function):
    """The bias over distances (H, R) as a matrix (H, L, L)."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, length: int) -> Tensor:
        ctx.distances = bias.shape[1]
        return window(bias, 0, length, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_distances(grad, 0, ctx.distances), None


@dataclass(frozen=True)
class Tile:
    """Rows of a group that attend at once.

    Args:
        rows, num_queries, num_keys: b, L and M.
        first_query, first_key: number of the first token.
        block: queries of a row that are taken at a time.
        is_full: whether no key is padding.
    """

    rows: int
    num_queries: int
    num_keys: int
    first_query: int
    first_key: int
    block: int
    is_full: bool

    def queries(self, flat: Tensor) -> Tensor:
        """Queries among (N, ...) as (b, L, ...)."""
        end = self.first_query + self.rows * self.num_queries
        return flat[self.first_query : end].unflatten(0, (self.rows, self.num_queries))

    def keys(self, flat: Tensor) -> Tensor:
        """Keys among (N', ...) as (b, M, ...)."""
        end = self.first_key + self.rows * self.num_keys
        return flat[self.first_key : end].unflatten(0, (self.rows, self.num_keys))

    def blocks(self) -> Iterator[slice]:
        """The queries that are taken together."""
        for first in range(0, self.num_queries, self.block):
            yield slice(first, min(first + self.block, self.num_queries))


def tiles(rows: tuple[Rows, Rows], heads: int, scores: int) -> Iterator[Tile]:
    """Cut the attention of query rows to key rows into tiles of so many scores.

    Query rows of one key row (its answers) lie side by side and are taken as one long row: there is no bias between
    them.
    """
    queries, keys = rows
    first_query = 0
    first_key = 0
    for query_group, key_group in zip(queries.layout, keys.layout, strict=True):
        num_rows = len(key_group.rows)
        num_queries = query_group.size // num_rows
        together, block = tile_sizes(num_rows, num_queries, key_group.width, heads, scores)
        for first in range(0, num_rows, together):
            yield Tile(
                min(together, num_rows - first),
                num_queries,
                key_group.width,
                first_query + first * num_queries,
                first_key + first * key_group.width,
                block,
                keys.is_full(key_group),
            )
        first_query += query_group.size
        first_key += key_group.size


class DenseAttention(torch.autograd.Function):
    """Arguments: bias, rows, causal and dropout as of `model.attention.attend`, and then q, k and v: in three tensors,
    with their heads beside each other in one, (N, 3 H, K), or q and such a one of k and v. Returns (N, H, K).

    Memory: q, k and v are kept, by the memory-efficient kernel also its result and a number for each query and head;
    while running, the scores of a tile.
    """

    @staticmethod
    def forward(
        ctx: Any, bias: Tensor | None, rows: tuple[Rows, Rows], causal: bool, dropout: Dropout, *packed: Tensor
    ) -> Tensor:
        call = _DenseCall(bias, rows, causal, dropout, packed)
        out = None if call.is_direct else call.empty(rows[0], call.heads)
        states = list[Tensor]()
        for number, tile in enumerate(call.tiles):
            q, k, v = call.split(tile)
            for block in tile.blocks():
                part, state = call.attend(q[:, block], k, v, call.mask(tile, block), (number, block.start))
                states += state
                if out is None:
                    out = part.flatten(0, 1)
                else:
                    tile.queries(out)[:, block] = part
        ctx.save_for_backward(bias, out if call.is_fused else None, *packed, *states)
        ctx.arguments = rows, causal, dropout, len(packed)
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, causal, dropout, count = ctx.arguments
        bias, out, *saved = ctx.saved_tensors
        packed = saved[:count]
        states = iter(saved[count:])
        call = _DenseCall(bias, rows, causal, dropout, packed)
        call.needs_bias = bias is not None and ctx.needs_input_grad[0]
        grad = grad.reshape(len(grad), call.heads, -1)
        sides = (rows[0], *[rows[1]] * (count - 1))
        grads = [] if call.is_direct else [call.empty(side, x.shape[1]) for side, x in zip(sides, packed, strict=True)]
        for number, tile in enumerate(call.tiles):
            views = call.sides(tile, grads)
            totals = [part for view in views for part in view.split(call.heads, 2)]
            for block in tile.blocks():
                tile_out = None if out is None else tile.queries(out)[:, block]
                parts = call.gradients(tile, block, tile.queries(grad)[:, block], tile_out, states, number)
                if call.is_direct:
                    grads = [part.flatten(0, 1) for part in _side_by_side(parts, packed, call.heads)]
                elif tile.block == tile.num_queries:
                    for view, x in zip(views, packed, strict=True):
                        torch.cat([parts.pop(0) for _ in range(x.shape[1] // call.heads)], 2, out=view)
                else:
                    totals[0][:, block] = parts[0]
                    for total, part in zip(totals[1:], parts[1:], strict=True):
                        total.add_(part) if block.start else total.copy_(part)
        return call.dbias, None, None, None, *grads


def _side_by_side(parts: list[Tensor], packed: Sequence[Tensor], heads: int) -> list[Tensor]:
    """Gradients of queries, keys and values with their heads beside each other, as those are packed."""
    grads = []
    for x in packed:
        together = [parts.pop(0) for _ in range(x.shape[1] // heads)]
        grads.append(together[0] if len(together) == 1 else torch.cat(together, 2))
    return grads


class _DenseCall:
    """What forward and backward of one attention share. Queries are (b, t, H, K), keys and values (b, M, H, K)."""

    def __init__(
        self, bias: Tensor | None, rows: tuple[Rows, Rows], causal: bool, dropout: Dropout, packed: Sequence[Tensor]
    ) -> None:
        self.bias = bias
        self.rows = rows
        self.causal = causal
        self.dropout = dropout
        self.packed = packed
        self.heads = sum(x.shape[1] for x in packed) // 3
        self.device = packed[0].device
        self.dtype = packed[0].dtype
        self.is_fused = bool(has_fused_attention(self.device) and packed[0].shape[2] % ALIGNED == 0 and rows[1].groups)
        self.tiles = list(tiles(rows, self.heads, traits_of(self.device).score_elements))
        self.needs_bias = False
        self.dbias: Tensor | None = None

    @property
    def is_direct(self) -> bool:
        """Whether one tile holds all tokens, so that what it gives lies as it is needed: fewer kernels, less memory."""
        fillers = self.rows[0].filler + self.rows[1].filler
        return len(self.tiles) == 1 and self.tiles[0].block == self.tiles[0].num_queries and not fillers

    def sides(self, tile: Tile, packed: Sequence[Tensor]) -> list[Tensor]:
        """What a tile has of tensors that lie as queries, keys and values do."""
        return [tile.keys(x) if number else tile.queries(x) for number, x in enumerate(packed)]

    def split(self, tile: Tile) -> list[Tensor]:
        """Queries, keys and values of a tile."""
        return [part for x in self.sides(tile, self.packed) for part in x.split(self.heads, 2)]

    def empty(self, rows: Rows, heads: int) -> Tensor:
        """For results of all tiles (N, heads, K); those of the filler are zeros.

        Made before the scores: small results between them would keep their freed memory from being used again.
        """
        results = self.packed[0].new_empty(rows.num_tokens, heads, self.packed[0].shape[2])
        if rows.filler:
            results[-rows.filler :] = 0
        return results

    def mask(self, tile: Tile, block: slice) -> Tensor | None:
        """What is added to the scores of a block of queries, as if it were there for each row: (b, H, t, M)."""
        mask: Tensor | None = None
        if self.bias is not None and self.bias.dim() == 3:
            mask = self.bias[:, block, : tile.num_keys].to(self.dtype)
        elif self.bias is not None:
            mask = window(self.bias.to(self.dtype), block.start, block.stop - block.start, tile.num_keys)
        # Behind the last token of a causal row stands padding alone, which looks at whatever is there.
        if not tile.is_full and not self.causal:
            hidden = tile.keys(self._hidden())[:, None, None]
            mask = hidden if mask is None else mask + hidden
        return None if mask is None else mask.expand(tile.rows, self.heads, block.stop - block.start, tile.num_keys)

    def _hidden(self) -> Tensor:
        """(N',): -inf where there is padding, else 0."""
        keys = self.rows[1]

        def make() -> Tensor:
            zeros = torch.zeros(keys.num_tokens, dtype=self.dtype, device=self.device)
            return zeros.masked_fill_(keys.is_padding(self.device), -torch.inf)

        return keys.cached(("hidden", self.dtype, self.device), make)  # type: ignore[no-any-return]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, site: tuple[int, int]
    ) -> tuple[Tensor, list[Tensor]]:
        """softmax(q k^T + mask) v, and what backward needs of the memory-efficient kernel: log-sum-exp, seed and
        offset.
        """
        if not self.is_fused:
            weights = self._weights(q, k, mask)
            factors = self._dropout_factors(weights, site)
            out = (weights if factors is None else weights.mul_(factors)) @ v.transpose(1, 2)
            return out.transpose(1, 2), []
        # By its own name: `scaled_dot_product_attention` may choose cuDNN's kernel, which gives NaN for some masks
        # (pytorch 196678).
        out, *state = torch.ops.aten._efficient_attention_forward(
            q, k, v, mask, None, None, q.shape[1], k.shape[1], self.dropout.rate, NO_MASK_TYPE, True, scale=1.0
        )[:4]
        return out, state

    def gradients(
        self, tile: Tile, block: slice, grad: Tensor, out: Tensor | None, states: Iterator[Tensor], number: int
    ) -> list[Tensor]:
        """The gradients of a block's queries, and of all keys and values; that of the bias is added to `dbias`."""
        q, k, v = self.split(tile)
        q = q[:, block]
        mask = self.mask(tile, block)
        if out is None:
            *grads, dscores = self._plain_gradients(grad, q, k, v, mask, (number, block.start))
        else:
            *grads, dscores = self._fused_gradients(grad, q, k, v, mask, out, list(islice(states, 3)))
        if self.needs_bias:
            self._add_to_bias(dscores, block)
        return grads

    def _fused_gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, state: list[Tensor]
    ) -> tuple[Tensor, ...]:
        logsumexp, seed, offset = state
        # With one split of the keys, sums have one order.
        return torch.ops.aten._efficient_attention_backward(
            grad,
            q,
            k,
            v,
            mask,
            out,
            None,
            None,
            q.shape[1],
            k.shape[1],
            logsumexp,
            self.dropout.rate,
            seed,
            offset,
            NO_MASK_TYPE,
            self.needs_bias,
            scale=1.0,
            num_splits_key=1,
        )

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """(b, H, t, M)."""
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
        return (scores if mask is None else scores.add_(mask)).softmax(-1)

    def _dropout_factors(self, weights: Tensor, site: tuple[int, int]) -> Tensor | None:
        """What weights are multiplied by where some are dropped: 0, or the inverse of the share that is kept."""
        if not self.dropout.active:
            return None
        tile, first = site
        seed_generator(self.device, self.dropout.seed(1 + tile, first))
        return torch.empty_like(weights).bernoulli_(1 - self.dropout.rate).div_(1 - self.dropout.rate)

    def _plain_gradients(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, site: tuple[int, int]
    ) -> tuple[Tensor, ...]:
        weights = self._weights(q, k, mask)
        factors = self._dropout_factors(weights, site)
        grad = grad.transpose(1, 2)
        dv = (weights if factors is None else weights * factors).mT @ grad
        dweights = grad @ v.permute(0, 2, 3, 1)
        if factors is not None:
            dweights.mul_(factors)
        del factors
        if weights.is_cpu:
            # Of rows that fill no whole vector, torch's own function gives other bits with other numbers of threads.
            dscores = dweights.mul_(weights)
            wide = torch.promote_types(dscores.dtype, torch.float32)
            sums = dscores.sum(-1, keepdim=True, dtype=wide).to(dscores.dtype)
            dscores.addcmul_(weights, sums, value=-1)
        else:
            dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
        del dweights, weights
        dq = dscores @ k.transpose(1, 2)
        dk = dscores.mT @ q.transpose(1, 2)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dscores

    def _add_to_bias(self, dscores: Tensor, block: slice) -> None:
        """Add the gradient of scores (b, H, t, M) to that of the bias."""
        assert self.bias is not None
        sums = dscores.sum(0, dtype=self.bias.dtype)
        if self.bias.dim() == 2:
            sums = sum_over_distances(sums, block.start, self.bias.shape[1])
        if self.dbias is None and sums.shape == self.bias.shape:
            self.dbias = sums
            return
        if self.dbias is None:
            self.dbias = torch.zeros_like(self.bias)
        part = self.dbias if self.bias.dim() == 2 else self.dbias[:, block, : sums.shape[2]]
        part += sums
