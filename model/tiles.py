"""Which rows share a tile of attention, and where are their tokens?

Rows of like length lie side by side: queries and keys are padded to a size from a small set (`limits.padded_length`), so
that one product serves many short rows. Long rows have a tile of their own, or several, one for each block of queries.
The queries of a row come last first: then a query sees the bias of its neighbour one place further, and the bias of all
is a view of overlapping windows (`model.attention`).

Shapes: N query and N' key tokens, H heads, b rows of a group, L their padded queries, M their padded keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import limits
from model.rows import Rows, places_of


@dataclass(frozen=True)
class Group:
    """Rows that pass through attention side by side.

    Args:
        num_rows: b, places without a row counted. num_queries, num_keys: L and M. block: queries of a tile.
        queries: (b, L) int32, the token of each place, last query first; a place without one names some token.
        keys: (b, M) int32, likewise, first key first.
        rows: (b,) int64, the row of each place.
        live: (b, L) bool, whether there is a query; None: everywhere.
        blank: (b, M) bool, whether there is no key; None: nowhere. The first key is always there.
        start, key_start: where this group begins among the padded queries, and keys, of all groups.
    """

    num_rows: int
    num_queries: int
    num_keys: int
    block: int
    queries: Tensor
    keys: Tensor
    rows: Tensor
    live: Tensor | None
    blank: Tensor | None
    start: int
    key_start: int

    def blocks(self) -> Iterator[slice]:
        """The places of the queries of each tile."""
        for first in range(0, self.num_queries, self.block):
            yield slice(first, min(first + self.block, self.num_queries))


@dataclass(frozen=True)
class Layout:
    """How all rows of a micro-batch are attended to.

    Args:
        groups: each row is in one of them.
        num_queries, num_keys: padded ones of all groups together.
        query_homes, key_homes: (N, 2) and (N', 2) int32, for each token the first of its H places among the padded ones of
            all groups, and how far they lie apart; H times `num_queries` (`num_keys`), and 0, for the filler.
    """

    groups: tuple[Group, ...]
    num_queries: int
    num_keys: int
    query_homes: Tensor
    key_homes: Tensor


def layout_of(query_rows: Rows, key_rows: Rows, num_heads: int, width: int, device: torch.device) -> Layout:
    """The layout of these rows, made once and kept with the query rows. `width`: K, of a head.

    Memory: 20 bytes a padded token.
    """

    def make() -> Layout:
        return _make(query_rows, key_rows, num_heads, width, device)

    key = "layout", num_heads, width, key_rows.lengths, key_rows.filler, device
    return query_rows.cached(key, make)  # type: ignore[no-any-return]


def _make(query_rows: Rows, key_rows: Rows, num_heads: int, width: int, device: torch.device) -> Layout:
    query_homes = np.zeros((query_rows.num_tokens, 2), np.int32)
    key_homes = np.zeros((key_rows.num_tokens, 2), np.int32)
    groups, start, key_start = [], 0, 0
    for group in limits.row_groups(query_rows.lengths, key_rows.lengths, num_heads, width):
        places, num_queries, num_keys = group.places, group.num_queries, group.num_keys
        queries, live = places_of(query_rows, group.rows, num_queries, places)
        keys, there = places_of(key_rows, group.rows, num_keys, places)
        queries, live = queries[:, ::-1], live[:, ::-1]
        _settle(query_homes, queries, live, start, num_heads, group.block)
        _settle(key_homes, keys, there, key_start, num_heads, num_keys)
        there = there | (np.arange(num_keys) == 0)  # else the softmax of a place without a row would be NaN
        rows = [*group.rows, *[0] * (places - len(group.rows))]
        groups.append(
            Group(
                places, num_queries, num_keys, group.block, _tensor(queries, np.int32, device),
                _tensor(keys, np.int32, device), torch.tensor(rows, device=device),
                None if live.all() else _tensor(live, np.bool_, device),
                None if there.all() else _tensor(~there, np.bool_, device), start, key_start,
            )
        )  # fmt: skip
        start += places * num_queries
        key_start += places * num_keys
    query_homes[query_rows.row_tokens :, 0] = start * num_heads
    key_homes[key_rows.row_tokens :, 0] = key_start * num_heads
    homes = _tensor(query_homes, np.int32, device), _tensor(key_homes, np.int32, device)
    return Layout(tuple(groups), start, key_start, *homes)


def _settle(
    homes: NDArray[np.int32], tokens: NDArray[np.int64], there: NDArray[np.bool_], start: int, heads: int, block: int
) -> None:
    """Write down where the padded places (b, L) of a group lie: by row, block, head and place in the block."""
    size, length = tokens.shape
    places = np.arange(length)
    first = places // block * block
    width = np.minimum(block, length - first)  # of the block that a place is in
    before = size * heads * first if block < length else 0
    rows = np.arange(size)[:, None] * heads * width
    home = start * heads + before + rows + (places - first)
    homes[tokens[there], 0] = home[there]
    homes[tokens[there], 1] = np.broadcast_to(width, tokens.shape)[there]


def _tensor(values: NDArray, dtype: type, device: torch.device) -> Tensor:  # type: ignore[type-arg]
    return torch.from_numpy(np.ascontiguousarray(values, dtype)).to(device)


def add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Write left right into the first places of total (b H, M, K), or add it: the first tile of a group sees all keys."""
    if is_first:
        torch.bmm(left, right, out=total)
    else:
        total[:, : left.shape[1]].baddbmm_(left, right)
