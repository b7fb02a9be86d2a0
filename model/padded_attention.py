"""Attention by torch's own operations, on every device: rows of like length are padded and pass through together.

As many rows are taken at a time as the device forms scores (`devices.base`), and of a longer row as many queries: memory is
linear in the length. Backward has q, k and v, and forms the weights again; one backward yields dq, dk, dv and the gradient of
the bias. Where rows lie and where their tokens go is worked out on the host and copied once for all layers of a step. Where
nothing is dropped and the device has it, torch's memory-efficient kernel computes, else plain products.

Shapes: N query tokens, N' key tokens, H heads, K d_kv, R distances, b rows of a group, L their padded queries, t of them at a
time, M their padded keys. Source: recompute in tiles: Rabe and Staats 2021 (arXiv 2112.05682).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from devices.base import has_fused, place, traits_of
from devices.pointwise import mix
from limits import fuses_backward, row_groups
from model.dropout import Dropout, mixed_places
from model.layers import as_one
from model.rows import Rows, places_of

ALIGNED = 8  # numbers of a head, and keys, that the fused kernel reads at a time
NO_MASK_TYPE = 0  # of the fused kernel: causality stands in the bias


@dataclass(frozen=True)
class Side:
    """Where the queries, or the keys, of a group are.

    Args:
        shape: b, and L or M. start: of its places among those of all groups.
        tokens: (b L) int32, the token of each place; None: they follow each other from `first` on, all there.
        there: (b, L) bool, whether there is one; None: everywhere.
    """

    shape: tuple[int, int]
    start: int
    first: int
    tokens: Tensor | None
    there: Tensor | None

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def gather(self, flat: Tensor) -> Tensor:
        """Tokens of flat (N, H, K) as (b, L, H, K)."""
        found = flat[self.first : self.first + self.size] if self.tokens is None else flat.index_select(0, self.tokens)
        return found.unflatten(0, self.shape)

    def places(self, room: Tensor) -> Tensor:
        """Where results of this group are written: (b, L, H, K) of the places of all groups."""
        return room[self.start : self.start + self.size].unflatten(0, self.shape)


@dataclass(frozen=True)
class Group:
    """Rows that pass through attention together.

    Args:
        rows: (b,) int64, the row of each place; None: all of them in order. block: queries that are taken at a time.
        blank: (b, 1, 1, M) bool, where there is no key; None: nowhere.
    """

    rows: Tensor | None
    queries: Side
    keys: Side
    blank: Tensor | None
    block: int

    def parts(self) -> Iterator[slice]:
        """The queries that are taken together: all, but of a row whose scores are too many."""
        for first in range(0, self.queries.shape[1], self.block):
            yield slice(first, min(first + self.block, self.queries.shape[1]))


@dataclass(frozen=True)
class Layout:
    """How all rows of a micro-batch are attended to.

    Args:
        query_homes, key_homes: (N,) int32, the place of each token among those of all groups, the filler's being any. None:
            tokens are the places, in order.
    """

    groups: tuple[Group, ...]
    query_homes: Tensor | None
    key_homes: Tensor | None

    @property
    def reach(self) -> int:
        """The longest of its padded rows."""
        return max(max(group.queries.shape[1], group.keys.shape[1]) for group in self.groups)

    def fuses_backward(self, heads: int, processors: int) -> bool:
        """As of `limits`, of any group."""
        shapes = ((*group.queries.shape, group.keys.shape[1]) for group in self.groups)
        return any(fuses_backward(places, heads, queries, keys, processors) for places, queries, keys in shapes)


def layout_of(rows: tuple[Rows, Rows], heads: int, device: torch.device) -> Layout:
    """The layout of these rows, made once and kept with the query rows. Memory: 8 bytes a padded token."""
    queries, keys = rows
    scores = traits_of(device).scores

    def make() -> Layout:
        groups: list[Group] = []
        starts, homes = [0, 0], [np.full(side.num_tokens, -1, np.int64) for side in rows]
        for plan in row_groups(queries.lengths, keys.lengths, heads, scores):
            sides, theres = list[Side](), []
            for number, length in enumerate((plan.num_queries, plan.num_keys)):
                tokens, there = places_of(rows[number], plan.rows, length, plan.places)
                homes[number][tokens[there]] = starts[number] + np.flatnonzero(there)
                is_same = keys is queries and number == 1  # then a row has as many padded keys as queries
                sides.append(sides[0] if is_same else _side(tokens, there, starts[number], device))
                theres.append(there)
                starts[number] += there.size
            members = np.zeros(plan.places, np.int64)
            members[: len(plan.rows)] = plan.rows
            in_order = plan.rows == tuple(range(len(queries.lengths))) and plan.places == len(plan.rows)
            blank = ~theres[1]
            blank[:, 0] = False  # else the softmax of a place without a row would be NaN
            of_groups = None if in_order else place(torch.from_numpy(members), device)
            hidden = place(torch.from_numpy(blank[:, None, None]), device) if blank.any() else None
            groups.append(Group(of_groups, sides[0], sides[1], hidden, plan.block))
        found = list[Tensor | None]()
        for home, end in zip(homes[: 1 if keys is queries else 2], starts, strict=False):
            home[home < 0] = 0  # the filler's, of which nothing is read
            found.append(None if np.array_equal(home, np.arange(end)) else _indices(home, device))
        return Layout(tuple(groups), found[0], found[-1])

    key = "padded layout", heads, keys.lengths, keys.filler, device, scores
    return queries.cached(key, make)  # type: ignore[no-any-return]


def place_indices(rows: tuple[Rows, Rows], heads: int, dropout: Dropout, device: torch.device) -> None:
    """Bring to a GPU what attention of these rows needs to know of where they lie."""
    layout = layout_of(rows, heads, device)
    if dropout.active:
        for part in {(part.start, part.stop): part for group in layout.groups for part in group.parts()}.values():
            mixed_places(rows[0], heads, part, device)


def _side(tokens: NDArray[np.int64], there: NDArray[np.bool_], start: int, device: torch.device) -> Side:
    shape, first = (tokens.shape[0], tokens.shape[1]), int(tokens[0, 0])
    if there.all() and np.array_equal(tokens.ravel(), np.arange(first, first + tokens.size)):
        return Side(shape, start, first, None, None)
    live = None if there.all() else place(torch.from_numpy(there), device)
    return Side(shape, start, first, _indices(tokens, device), live)


def _indices(values: NDArray[np.int64], device: torch.device) -> Tensor:
    return place(torch.from_numpy(np.ascontiguousarray(values.ravel(), np.int32)), device)


class PaddedAttention(torch.autograd.Function):
    """Arguments: bias, rows and dropout as of `model.attention.attend`, and then q, k and v: in three tensors, with their heads beside
    each other in one, (N, 3 H, K), or q and such a one of k and v.

    Memory: q, k, v kept; while running, padded copies and the scores of a group.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, rows: tuple[Rows, Rows], dropout: Dropout, *packed: Tensor) -> Tensor:
        ctx.save_for_backward(bias, *packed)
        ctx.rows, ctx.dropout = rows, dropout
        call = _Call(bias, rows, dropout, packed, is_backward=False)
        if call.is_direct:
            out = _end_to_end([call.attend(group) for group in call.layout.groups])
        else:
            out = call.room(call.heads, is_keys=False)
            for group in call.layout.groups:
                call.forward(group, out)
        return call.collect(out, is_keys=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        bias, *packed = ctx.saved_tensors
        call = _Call(bias, ctx.rows, ctx.dropout, packed, is_backward=True)
        grad = grad.reshape(len(grad), call.heads, -1)
        call.has_dbias = bias is not None and ctx.needs_input_grad[0]
        if call.is_direct:
            parts = [call.gradients(group, grad) for group in call.layout.groups]
            found = [_end_to_end([part.pop(0) for part in parts]) for _ in packed]
        else:
            found = [call.room(x.shape[1], is_keys) for x, is_keys in zip(packed, call.is_keys, strict=True)]
            for group in call.layout.groups:
                call.backward(group, grad, found)
        found = [call.collect(found.pop(0), is_keys) for is_keys in call.is_keys]
        return None if call.dbias is None else call.dbias.to(bias.dtype), None, None, *found


def _end_to_end(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class _Call:
    """One attention: what forward and backward share. q, k and v of a group are (b, L, H, K) where fused, else (b H, L, K)."""

    def __init__(
        self,
        bias: Tensor | None,
        rows: tuple[Rows, Rows],
        dropout: Dropout,
        packed: Sequence[Tensor],
        *,
        is_backward: bool,
    ) -> None:
        self.packed, self.rows, self.dropout = packed, rows, dropout
        self.is_keys = (False, True, True)[: len(packed)]  # whether each lies as the keys do
        self.heads, self.like = sum(x.shape[1] for x in packed) // 3, packed[0]
        device, width = self.like.device, self.like.shape[2]
        self.layout = layout_of(rows, self.heads, device)
        self.wide: Tensor | None = None  # the bias, cut or filled up to the distances of padded rows
        if bias is not None:
            self.wide, more = bias.detach().to(self.like.dtype), self.layout.reach - 1 - bias.shape[1] // 2
            self.wide = F.pad(self.wide, (more, more)) if more else self.wide
        self.distances = 0 if bias is None else bias.shape[1]
        self.has_dbias = False  # whether the gradient of the bias is wanted
        self.dbias: Tensor | None = None
        self.is_fused = not dropout.active and width % ALIGNED == 0 and has_fused(device)
        self.is_fused &= not is_backward or self.layout.fuses_backward(self.heads, traits_of(device).processors)
        # what the fused kernel gives lies as it is needed
        self.is_direct = self.is_fused and all(len(list(group.parts())) == 1 for group in self.layout.groups)

    def room(self, heads: int, is_keys: bool) -> Tensor:
        """For results of all groups: (places, heads, K).

        Made before the scores: small results between them would keep their freed memory from being used again.
        """
        last = self.layout.groups[-1].keys if is_keys else self.layout.groups[-1].queries
        return self.like.new_empty(last.start + last.size, heads, self.like.shape[2])

    def collect(self, room: Tensor, is_keys: bool) -> Tensor:
        """From the padded places of all groups back to tokens; the filler's are zeros."""
        homes = self.layout.key_homes if is_keys else self.layout.query_homes
        if homes is None:
            return room
        tokens = room.index_select(0, homes)
        if filler := self.rows[is_keys].filler:
            tokens[-filler:] = 0
        return tokens

    def forward(self, group: Group, out: Tensor) -> None:
        """Write the output of a group."""
        q, k, v = self._gathered(group)
        places = group.queries.places(out)
        for part in group.parts():
            self._put(self._attend(q[:, part], k, v, group, part), places[:, part], is_first=True)

    def attend(self, group: Group) -> Tensor:
        """The output of a group that is taken at once: (places, H, K)."""
        (part,) = group.parts()
        return self._attend(*self._gathered(group), group, part).flatten(0, 1)

    def backward(self, group: Group, grad: Tensor, rooms: Sequence[Tensor]) -> None:
        """Write the gradients of a group's queries, keys and values; that of the bias is added."""
        q, k, v = self._gathered(group)
        grad = self._gathered_grad(group, grad)
        places = zip(rooms, self.is_keys, strict=True)
        sides = [(group.keys if is_keys else group.queries).places(room) for room, is_keys in places]
        dq, dk, dv = (part for side in sides for part in side.split(self.heads, 2))
        back = self._fused_back if self.is_fused else self._plain_back
        for part in group.parts():
            found = back(q[:, part], k, v, grad[:, part], group, part)
            self._put(found[0], dq[:, part], is_first=True)
            self._put(found[1], dk, is_first=part.start == 0)
            self._put(found[2], dv, is_first=part.start == 0)
            del found

    def gradients(self, group: Group, grad: Tensor) -> list[Tensor]:
        """The gradients of a group that is taken at once, as q, k and v are packed: (places, heads, K)."""
        (part,), grad = group.parts(), self._gathered_grad(group, grad)
        found, packed = iter(self._fused_back(*self._gathered(group), grad, group, part)), []
        for x in self.packed:
            parts = list(islice(found, x.shape[1] // self.heads))
            one = parts[0] if len(parts) == 1 else as_one(parts, 2)
            packed.append((torch.cat(parts, 2) if one is None else one).flatten(0, 1))
        return packed

    def _gathered(self, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        sides = [group.keys if is_keys else group.queries for is_keys in self.is_keys]
        q, k, v = (x for side, x in zip(sides, self.packed, strict=True) for x in self._form(side.gather(x)))
        return q, k, v

    def _gathered_grad(self, group: Group, grad: Tensor) -> Tensor:
        grad = group.queries.gather(grad)
        if group.queries.there is not None:
            grad = grad.mul_(group.queries.there[:, :, None, None])
        return self._form(grad)[0]

    def _form(self, x: Tensor) -> Sequence[Tensor]:
        """Of (b, L, c H, K), c tensors as they are computed with."""
        if self.is_fused:
            return x.split(self.heads, 2)
        return x.unflatten(2, (-1, self.heads)).permute(2, 0, 3, 1, 4).flatten(1, 2).unbind()

    def _put(self, x: Tensor, places: Tensor, is_first: bool) -> None:
        """Write results to places (b, t, H, K), or add them."""
        x = x if self.is_fused else x.unflatten(0, (-1, self.heads)).transpose(1, 2)
        if is_first:
            places.copy_(x)
        else:
            places.add_(x)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, group: Group, part: slice) -> Tensor:
        if self.is_fused:
            return _fused(q, k, v, self._mask(group, part))[0]  # type: ignore[no-any-return]
        weights = self._weights(q, k, group, part)
        return torch.bmm(self._mask_of(weights, group, part)(weights), v)

    def _bias(self, part: slice, keys: int) -> Tensor:
        """The bias of the queries `part` as a matrix (H, t, M)."""
        assert self.wide is not None
        length, first, device = part.stop - part.start, self.layout.reach - part.stop, self.like.device
        windows = self.wide[:, first : first + length + keys - 1].unfold(1, keys, 1)  # the last query's first
        backwards = partial(torch.arange, length - 1, -1, -1, device=device)
        order = self.rows[0].cached(("backwards", length, device), backwards)
        # a flip would keep the order of the windows' strides, which are equal; the fused kernel takes contiguous rows only
        return windows.index_select(1, order)

    def _add_to_bias(self, scores: Tensor, first: int) -> None:
        """Add the gradient of scores (b, H, t, M), of the queries from `first` on, to that of the bias (H, R)."""
        if not self.has_dbias:
            return
        (_, heads, t, keys), wide = scores.shape, torch.promote_types(scores.dtype, torch.float32)
        # with t zeros before each line, and one more place a line, equal distances stand in one column
        room = scores.new_zeros(heads, t * (t + keys + 1), dtype=wide)
        lines = room[:, : t * (t + keys)].view(heads, t, t + keys)[:, :, t:]
        lines.copy_(scores.sum(0, dtype=wide))
        sums = room.view(heads, t, t + keys + 1).sum(1)
        start = self.distances // 2 - first - t  # the place of the first column's distance
        low, high = max(0, start), min(self.distances, start + sums.shape[1])
        sums = sums[:, low - start : high - start]
        if self.dbias is None and high - low == self.distances:
            self.dbias = sums
        else:
            self.dbias = sums.new_zeros(heads, self.distances) if self.dbias is None else self.dbias
            self.dbias[:, low:high] += sums

    # --- fused

    def _mask(self, group: Group, part: slice) -> Tensor | None:
        """What is added to the scores, as if it were there for each row, head and query: (b, H, t, M)."""
        keys = group.keys.shape[1]
        if self.wide is None and group.blank is None:
            return None
        mask = self.like.new_zeros(1, 1, 1, keys) if self.wide is None else self._bias(part, keys).unsqueeze(0)
        mask = mask if group.blank is None else mask.masked_fill(group.blank, -torch.inf)
        return mask.expand(group.keys.shape[0], self.heads, part.stop - part.start, keys)

    def _fused_back(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, group: Group, part: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask, has_dmask = self._mask(group, part), self.has_dbias
        out, logsumexp, seed, offset = _fused(q, k, v, mask)
        is_packed = self.is_direct and len(self.packed) == 1  # then the gradients lie as q, k and v do
        # with one split of the keys the sums have one order
        dq, dk, dv, dmask = torch.ops.aten._efficient_attention_backward(
            grad, q, k, v, mask, out, None, None, q.shape[1], k.shape[1], logsumexp, 0.0, seed, offset, NO_MASK_TYPE,
            has_dmask, scale=1.0, num_splits_key=1, shared_storage_dqdkdv=is_packed,
        )  # fmt: skip
        if has_dmask:
            self._add_to_bias(dmask, part.start)
        return dq, dk, dv

    # --- plain products

    def _weights(self, q: Tensor, k: Tensor, group: Group, part: slice) -> Tensor:
        scores = torch.bmm(q, k.mT)
        spread = scores.unflatten(0, (-1, self.heads))
        if self.wide is not None:
            spread.add_(self._bias(part, group.keys.shape[1]))
        if group.blank is not None:
            spread.masked_fill_(group.blank, -torch.inf)
        return torch.softmax(scores, -1)

    def _mask_of(self, weights: Tensor, group: Group, part: slice) -> Callable[[Tensor], Tensor]:
        """Dropout of weights (b H, t, M), a function of (row, head, query, key)."""
        if not self.dropout.active:
            return lambda x: x
        row_keys = self.dropout.row_keys()
        row_keys = row_keys if group.rows is None else row_keys.index_select(0, group.rows)
        keys = mix(row_keys[:, None, None], mixed_places(self.rows[0], self.heads, part, self.like.device))
        drop = self.dropout.mask(keys.flatten(), weights.flatten(0, 1))
        return lambda x: drop(x.flatten(0, 1)).view_as(x)

    def _plain_back(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, group: Group, part: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = self._weights(q, k, group, part)
        drop = self._mask_of(weights, group, part)
        dv = torch.bmm(drop(weights).mT, grad)
        dweights = drop(torch.bmm(grad, v.mT))
        arguments = dweights, weights, -1, weights.dtype
        if traits_of(q.device).softmax_in_place:
            # CUDA's forms a product as large besides, which would be a fourth such matrix
            dscores = torch.ops.aten._softmax_backward_data(*arguments, grad_input=dweights)
        else:
            dscores = torch.ops.aten._softmax_backward_data(*arguments)
        del weights, drop, dweights, arguments
        self._add_to_bias(dscores.unflatten(0, (-1, self.heads)), part.start)
        return torch.bmm(dscores, k), torch.bmm(dscores.mT, q), dv


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    """softmax(q k^T + mask) v (b, L, H, K), and what the way back needs: log-sum-exp, seed and offset.

    By its own name: `scaled_dot_product_attention` may choose cuDNN's kernel, which gives NaN for some masks (pytorch 196678).
    """
    return torch.ops.aten._efficient_attention_forward(
        q, k, v, mask, None, None, q.shape[1], k.shape[1], 0.0, NO_MASK_TYPE, True, scale=1.0
    )[:4]
