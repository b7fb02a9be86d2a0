"""How does attention compute on a GPU, where starting a kernel takes as long as a small one runs?

Rows of like length are padded and pass through together, as many at a time as the plan allows scores (`devices.base`).
Where rows lie and where their tokens go is worked out on the host and copied once for all layers of a step, and so is the
matrix of the bias, which all layers of a stack share. Nothing padded is kept: backward has the flat q, k and v, and works again.
Where nothing is dropped and the device has it, torch's fused kernels compute (`model.fused_attention`); else plain products.

Shapes: N query tokens, N' key tokens, H heads, K d_kv, R distances, b rows of a group, L their padded queries, M their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from devices.base import place, traits_of
from limits import RowGroup, wide_groups
from model.dropout import Dropout, counters, kept_of, mix, mixed_places, scale_kept
from model.fused_attention import fused, fused_back, takes_fused
from model.rows import Rows, places_of


@dataclass(frozen=True)
class Side:
    """Where the queries, or the keys, of a group are.

    Args:
        length: L or M. tokens: (b L) int32, the token of each place; None: the group's rows follow each other without gaps
            from token `first` on. there: (b, L) bool on the host, whether there is one.
    """

    length: int
    tokens: Tensor | None
    heads_tokens: Tensor | None
    first: int
    there: NDArray[np.bool_]
    there_on_device: Tensor | None

    def by_token(self, flat: Tensor) -> Tensor:
        """Tokens of flat (N, H, K) as (b, L, H, K)."""
        if self.tokens is None:
            return flat[self.first : self.first + self.there.size].unflatten(0, (-1, self.length))
        return flat.index_select(0, self.tokens).unflatten(0, (-1, self.length))

    def by_head(self, flat: Tensor) -> Tensor:
        """The same as (b H, L, K)."""
        width = flat.shape[2]
        if self.heads_tokens is None:
            return self.by_token(flat).transpose(1, 2).reshape(-1, self.length, width)
        return flat.reshape(-1, width).index_select(0, self.heads_tokens).view(-1, self.length, width)

    def live_(self, padded: Tensor, is_by_head: bool) -> Tensor:
        """Zero where there is no token, in place; `padded` as `by_token` or as `by_head` gives it."""
        if self.there_on_device is None:
            return padded
        live = self.there_on_device  # (b, L)
        if not is_by_head:
            return padded.mul_(live[:, :, None, None])
        padded.unflatten(0, (len(live), -1)).mul_(live[:, None, :, None])
        return padded


@dataclass(frozen=True)
class Group:
    """Rows that pass through attention together; `blank` (b, 1, 1, M) bool: where there is no key; None: nowhere."""

    plan: RowGroup
    rows: Tensor | None  # (b,) int64, the row of each place; None: all of them in order
    queries: Side
    keys: Side
    blank: Tensor | None

    def parts(self) -> Iterator[slice]:
        """The queries that are taken together: all, but of a row whose scores are too many."""
        for first in range(0, self.plan.num_queries, self.plan.block):
            yield slice(first, min(first + self.plan.block, self.plan.num_queries))


@dataclass(frozen=True)
class Homes:
    """Where among the padded places of all groups the tokens are.

    Args:
        tokens, heads: (N,) and (N H,) int32, of results as `Side.by_token` and `Side.by_head` lay them; the filler's is a
            place that holds no token, or, with `needs_zeros`, the one after the last.
    """

    tokens: Tensor
    heads: Tensor
    needs_zeros: bool


@dataclass(frozen=True)
class Layout:
    """How all rows of a micro-batch are attended to.

    Args:
        query_homes, key_homes: where the tokens are; None: they are the places, in order.
    """

    groups: tuple[Group, ...]
    query_homes: Homes | None
    key_homes: Homes | None


def layout_of(rows: tuple[Rows, Rows], heads: int, device: torch.device) -> Layout:
    """The layout of these rows, made once and kept with the query rows. Memory: 16 H bytes a padded token."""
    queries, keys = rows
    scores = traits_of(device).scores
    key = "padded layout", heads, keys.lengths, keys.filler, device, scores
    return queries.cached(key, lambda: _make(queries, keys, heads, scores, device))  # type: ignore[no-any-return]


def _make(queries: Rows, keys: Rows, heads: int, scores: int, device: torch.device) -> Layout:
    plans = list(wide_groups(queries.lengths, keys.lengths, heads, scores))
    places = [
        [places_of(rows, plan.rows, length, plan.places) for plan, length in zip(plans, lengths, strict=True)]
        for rows, lengths in ((queries, [p.num_queries for p in plans]), (keys, [p.num_keys for p in plans]))
    ]
    sides = [[_side(tokens, there, heads, device) for tokens, there in of] for of in places]
    groups = []
    for plan, query, key in zip(plans, *sides, strict=True):
        in_order = plan.rows == tuple(range(len(queries.lengths))) and plan.places == len(plan.rows)
        members = np.zeros(plan.places, np.int64)
        members[: len(plan.rows)] = plan.rows
        blank = ~key.there
        blank[:, 0] = False  # else the softmax of a place without a row would be NaN
        groups.append(
            Group(
                plan,
                None if in_order else place(torch.from_numpy(members), device),
                query,
                key,
                None if not blank.any() else place(torch.from_numpy(blank[:, None, None]), device),
            )
        )
    homes = [_homes(rows, of, heads, device) for rows, of in zip((queries, keys), places, strict=True)]
    return Layout(tuple(groups), *homes)


def _side(tokens: NDArray[np.int64], there: NDArray[np.bool_], heads: int, device: torch.device) -> Side:
    length, first = tokens.shape[1], int(tokens[0, 0])
    if there.all() and np.array_equal(tokens.ravel(), np.arange(first, first + tokens.size)):
        return Side(length, None, None, first, there, None)
    of_heads = tokens[:, None, :] * heads + np.arange(heads)[:, None]
    live = None if there.all() else place(torch.from_numpy(there), device)
    return Side(length, _indices(tokens, device), _indices(of_heads, device), first, there, live)


def _homes(
    rows: Rows, places: list[tuple[NDArray[np.int64], NDArray[np.bool_]]], heads: int, device: torch.device
) -> Homes | None:
    tokens = np.concatenate([tokens.ravel() for tokens, _ in places])
    if len(tokens) == rows.num_tokens and np.array_equal(tokens, np.arange(len(tokens))):
        return None
    home = np.full(rows.num_tokens, len(tokens), np.int64)
    of_heads = np.full((rows.num_tokens, heads), len(tokens) * heads, np.int64)
    start, has_room = 0, False
    for of_group, there in places:
        length = of_group.shape[1]
        at = np.arange(of_group.size).reshape(of_group.shape)
        home[of_group[there]] = (start + at)[there]
        row, offset = np.divmod(at, length)
        first = start * heads + row * heads * length + offset
        of_heads[of_group[there]] = first[there][:, None] + np.arange(heads) * length
        if not has_room and not there.all():  # a place without a token, whose gradients are zero, serves the filler
            has_room, empty = True, np.argmin(there.ravel())
            home[rows.row_tokens :] = start + empty
            row, offset = divmod(int(empty), length)
            of_heads[rows.row_tokens :] = start * heads + (row * heads + np.arange(heads)) * length + offset
        start += of_group.size
    needs_zeros = rows.filler > 0 and not has_room
    return Homes(_indices(home, device), _indices(of_heads, device), needs_zeros)


def _indices(values: NDArray[np.int64], device: torch.device) -> Tensor:
    return place(torch.from_numpy(np.ascontiguousarray(values.ravel(), np.int32)), device)


def collect(parts: list[Tensor], homes: Homes | None, heads: int, is_by_head: bool) -> Tensor:
    """From the padded places of all groups back to tokens: (N, H, K). Gradients of the filler are zeros."""
    width = parts[0].shape[-1]
    if homes is None and is_by_head:
        parts = [part.unflatten(0, (-1, heads)).transpose(1, 2) for part in parts]
    if homes is None:
        whole = [part.reshape(-1, heads, width) for part in parts]
        return whole[0] if len(whole) == 1 else torch.cat(whole)
    flat = [part.reshape(-1, width) if is_by_head else part.reshape(-1, heads, width) for part in parts]
    if homes.needs_zeros:
        flat.append(flat[0].new_zeros(1, *flat[0].shape[1:]))
    places = flat[0] if len(flat) == 1 else torch.cat(flat)
    return places.index_select(0, homes.heads if is_by_head else homes.tokens).view(-1, heads, width)


class BiasMatrix:
    """The bias over distances (H, R) as matrices (H, L, M), and the way back; one matrix serves all layers of a stack."""

    def __init__(self, bias: Tensor, rows: Rows, dtype: torch.dtype) -> None:
        self.bias, self.rows, self.dtype = bias, rows, dtype
        self.zero = bias.shape[1] // 2

    def of(self, group: Group, part: slice) -> Tensor:
        """(H, t, M) for the queries `part` of a group."""
        length, keys = part.stop - part.start, group.plan.num_keys
        known = self.rows.cached("bias matrices", WeakTensorKeyDictionary).setdefault(self.bias, {})
        key = part.start, length, keys, self.dtype
        if key not in known:
            index = self._index(part.start, length, keys)
            known[key] = self.bias.detach().to(self.dtype).index_select(1, index).view(-1, length, keys)
        return known[key]  # type: ignore[no-any-return]

    def _index(self, start: int, length: int, keys: int) -> Tensor:
        """(t M,): the place of each distance; of places without a token, that of some distance."""
        device, last = self.bias.device, self.bias.shape[1] - 1

        def make() -> Tensor:
            distances = np.arange(keys) - np.arange(start, start + length)[:, None]
            return _indices(np.clip(distances + self.zero, 0, last), device)

        return self.rows.cached(("distances", start, length, keys, last, device), make)  # type: ignore[no-any-return]

    def add_gradient(self, total: Tensor, scores: Tensor, start: int) -> None:
        """Add the gradient of scores (H, t, M), fp32, of the queries from `start` on, to total (H, R)."""
        heads, t, keys = scores.shape
        # with t zeros before each line, and one more place a line, equal distances stand in one column
        room = scores.new_zeros(heads, t * (t + keys + 1))
        room[:, : t * (t + keys)].view(heads, t, t + keys)[:, :, t:].copy_(scores)
        sums = room.view(heads, t, t + keys + 1).sum(1)
        first = self.zero - start - t  # the place of the first column's distance
        low, high = max(0, first), min(self.bias.shape[1], first + sums.shape[1])
        total[:, low:high] += sums[:, low - first : high - first]


class PaddedAttention(torch.autograd.Function):
    """Arguments as `model.attention.attend`. Memory: q, k, v kept; while running, padded copies and the scores of a group."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows], causal: bool, dropout: Dropout
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q, k, v, bias)
        ctx.rows, ctx.dropout = rows, dropout
        call = _Call(q, k, v, bias, rows, dropout)
        return collect([call.forward(group) for group in call.layout.groups], call.layout.query_homes, *call.form)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, bias = ctx.saved_tensors
        call = _Call(q, k, v, bias, ctx.rows, ctx.dropout)
        if bias is not None and ctx.needs_input_grad[3]:
            call.dbias = torch.zeros_like(bias, dtype=torch.promote_types(q.dtype, torch.float32))
        found = [call.backward(group, grad) for group in call.layout.groups]
        homes = (call.layout.query_homes, call.layout.key_homes, call.layout.key_homes)
        dq, dk, dv = (
            collect(list(parts), home, *call.form) for parts, home in zip(zip(*found, strict=True), homes, strict=True)
        )
        return dq, dk, dv, None if call.dbias is None else call.dbias.to(bias.dtype), None, None, None


class _Call:
    """One attention: what forward and backward share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rows: tuple[Rows, Rows], dropout: Dropout
    ) -> None:
        self.q, self.k, self.v, self.rows, self.dropout = q, k, v, rows, dropout
        self.heads = q.shape[1]
        self.layout = layout_of(rows, self.heads, q.device)
        self.bias = None if bias is None else BiasMatrix(bias, rows[0], q.dtype)
        self.dbias: Tensor | None = None
        self.is_fused = not dropout.active and takes_fused(q)

    @property
    def form(self) -> tuple[int, bool]:
        """Heads, and whether results are (b H, L, K)."""
        return self.heads, not self.is_fused

    def forward(self, group: Group) -> Tensor:
        """The output of a group: (b, L, H, K) fused, else (b H, L, K)."""
        of = self._gathered(group)
        q, k, v = of(group.queries, self.q), of(group.keys, self.k), of(group.keys, self.v)
        outs = []
        for part in group.parts():
            if self.is_fused:
                outs.append(fused(q[:, part], k, v, self._mask(group, part))[0])
            else:
                weights = self._weights(q[:, part], k, group, part)
                outs.append(torch.bmm(self._dropped(weights, self._kept(group, part)), v))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def backward(self, group: Group, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of a group's queries, keys and values; that of the bias is added."""
        of = self._gathered(group)
        q, k, v = of(group.queries, self.q), of(group.keys, self.k), of(group.keys, self.v)
        grad = group.queries.live_(of(group.queries, grad.reshape(self.q.shape)), not self.is_fused)
        way = self._fused_back if self.is_fused else self._plain_back
        found = [way(q[:, part], k, v, grad[:, part], group, part) for part in group.parts()]
        if len(found) == 1:
            return found[0]
        dq, dk, dv = zip(*found, strict=True)
        return torch.cat(dq, 1), sum(dk[1:], dk[0]), sum(dv[1:], dv[0])

    def _gathered(self, group: Group) -> Callable[[Side, Tensor], Tensor]:
        return Side.by_token if self.is_fused else Side.by_head

    # --- fused

    def _mask(self, group: Group, part: slice) -> Tensor | None:
        """What is added to the scores: (1 or b, 1 or H, 1 or t, M)."""
        blank = None if group.blank is None else _minus_infinity(group.blank, self.q.dtype)
        if self.bias is None:
            return blank
        matrix = self.bias.of(group, part).unsqueeze(0)
        return matrix if blank is None else matrix + blank

    def _fused_back(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, group: Group, part: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = self._mask(group, part)
        out, state = fused(q, k, v, mask)
        dq, dk, dv, dmask = fused_back(grad, q, k, v, mask, out, state, self.dbias is not None)
        if self.dbias is not None and self.bias is not None and dmask is not None:
            self.bias.add_gradient(self.dbias, dmask.sum(0, dtype=self.dbias.dtype), part.start)
        return dq, dk, dv

    # --- plain products

    def _weights(self, q: Tensor, k: Tensor, group: Group, part: slice) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2))
        spread = scores.unflatten(0, (-1, self.heads))
        if self.bias is not None:
            spread.add_(self.bias.of(group, part))
        if group.blank is not None:
            spread.add_(_minus_infinity(group.blank, scores.dtype))
        return torch.softmax(scores, -1)

    def _kept(self, group: Group, part: slice) -> Tensor | None:
        """(b H, t, M) bool: the weights that dropout leaves, a function of (row, head, query, key); None: all."""
        if not self.dropout.active:
            return None
        rows, keys = self.rows[0], group.plan.num_keys
        row_keys = self.dropout.row_keys()
        row_keys = row_keys if group.rows is None else row_keys.index_select(0, group.rows)
        places = mixed_places(rows, self.heads, part, self.q.device)  # (H, t)
        mixed = mix(row_keys[:, None, None] + places)
        words = mix(mixed.unsqueeze(-1) + counters(rows, keys, self.q.device))
        return kept_of(words, keys, self.dropout.threshold).view(-1, part.stop - part.start, keys)

    def _dropped(self, weights: Tensor, kept: Tensor | None) -> Tensor:
        return weights if kept is None else scale_kept(weights, kept, self.dropout.scale)

    def _plain_back(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, group: Group, part: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights, kept = self._weights(q, k, group, part), self._kept(group, part)
        dv = torch.bmm(self._dropped(weights, kept).transpose(1, 2), grad)
        dweights = self._dropped(torch.bmm(grad, v.transpose(1, 2)), kept)
        dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
        del weights, kept, dweights
        if self.dbias is not None and self.bias is not None:
            summed = dscores.unflatten(0, (-1, self.heads)).sum(0, dtype=self.dbias.dtype)
            self.bias.add_gradient(self.dbias, summed, part.start)
        return torch.bmm(dscores, k), torch.bmm(dscores.transpose(1, 2), q), dv


def _minus_infinity(blank: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(blank.shape, dtype=dtype, device=blank.device).masked_fill_(blank, -torch.inf)
