"""Which rows of a micro-batch are padded to one length and lie side by side, on devices without compiled kernels.

Rows of like length share a group, so that little is padded, and groups lie end to end, so that all but attention sees
one long list of tokens. Nothing here imports torch: the plan counts padded tokens by the same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devices.sizes import LEAST_FILLED

LEAST_WIDTH = 8  # The memory-efficient kernel of attention reads so many keys at a time.
LEAST_QUERIES = 16  # So many queries of a long row attend at once, if not more.
MOST_GROUPS = 8
LEAST_SAVED = 0.03  # Share of the padded tokens for which a further group is worth its kernels.
WIDTHS_PER_OCTAVE = 4
SIZES_PER_OCTAVE = 16
NUMBERS_OF_ROWS = 16  # A group has one of so many numbers of rows, where few are to be met.


@dataclass(frozen=True)
class PaddedGroup:
    """Rows that are padded to one length.

    Args:
        rows: their numbers, in the order in which they lie.
        width: tokens of each, with its padding.
    """

    rows: tuple[int, ...]
    width: int

    @property
    def size(self) -> int:
        """Tokens of all its rows, with their padding."""
        return len(self.rows) * self.width


def padded_widths(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Round lengths of rows up to few: multiples of 8, from 64 on four between a power of two and the next."""
    return _rounded_up(lengths, LEAST_WIDTH, WIDTHS_PER_OCTAVE)


def _rounded_up(numbers: NDArray[np.int64], least: int, sizes_per_octave: int) -> NDArray[np.int64]:
    octaves = 1 << np.ceil(np.log2(np.maximum(numbers, 1))).astype(np.int64)
    steps = np.maximum(least, octaves // 2 // sizes_per_octave)
    return -(-numbers // steps) * steps


def padded_size(tokens: int, few_shapes: bool = False) -> int:
    """Tokens of all groups, rounded up to few sizes: products meet no others.

    Args:
        few_shapes: whether libraries keep something for each size; more of them pad less.
    """
    return int(_rounded_up(np.array(tokens), LEAST_FILLED, WIDTHS_PER_OCTAVE if few_shapes else SIZES_PER_OCTAVE))


def tile_sizes(rows: int, queries: int, keys: int, heads: int, scores: int) -> tuple[int, int]:
    """Rows of a group that attend at once, and of each so many queries: of at most `scores` scores, if they are not too
    few.

    Args:
        rows, queries, keys: of the group, with padding.
    """
    most_rows = max(1, scores // (heads * queries * keys))
    most_queries = max(LEAST_QUERIES, scores // (heads * keys) // LEAST_QUERIES * LEAST_QUERIES)
    return min(rows, most_rows), min(queries, most_queries)


def share_out(lengths: Sequence[Sequence[int]], few_shapes: bool = False) -> list[tuple[int, ...]]:
    """Share rows out over at most 8 groups, so that few tokens are padded.

    Args:
        lengths: of each sequence that a row has (its source, each of its answers) the tokens in all rows.
        few_shapes: whether libraries keep something for each number of rows; there are fewer of them then.
    Returns:
        the numbers of the rows of each group. Rows of one length stay in their order.
    """
    columns = np.array(lengths, np.int64)
    granule = max(1, columns.shape[1] // NUMBERS_OF_ROWS) if few_shapes else 1
    groups = [np.arange(columns.shape[1])]
    cuts = [_best_cut(columns, granule)]
    tokens = int(padded_widths(columns.max(1)).sum() * columns.shape[1])
    while len(groups) < MOST_GROUPS:
        best = max(range(len(groups)), key=lambda number: cuts[number][0])
        saved, order, first = cuts[best]
        if saved <= LEAST_SAVED * tokens:
            break
        tokens -= saved
        ordered = groups[best][order]
        groups[best : best + 1] = [ordered[:first], ordered[first:]]
        cuts[best : best + 1] = [_best_cut(columns[:, part], granule) for part in (ordered[:first], ordered[first:])]
    return [tuple(group.tolist()) for group in groups]


def _best_cut(columns: NDArray[np.int64], granule: int) -> tuple[int, NDArray[np.int64], int]:
    """The cut in two that pads the fewest tokens: how many fewer they are, the order of the rows, and where it is cut.

    Args:
        granule: before the cut lies a multiple of so many rows.
    """
    count = columns.shape[1]
    best = (0, np.arange(count), count)
    whole = int(padded_widths(columns.max(1)).sum()) * count
    for column in columns:
        order = np.argsort(-column, kind="stable")
        ordered = columns[:, order]
        sizes = np.arange(granule, count, granule)
        longest_before = np.maximum.accumulate(ordered, axis=1)[:, sizes - 1]
        longest_after = np.maximum.accumulate(ordered[:, ::-1], axis=1)[:, ::-1][:, sizes]
        tokens = padded_widths(longest_before).sum(0) * sizes + padded_widths(longest_after).sum(0) * (count - sizes)
        if len(tokens) and whole - tokens.min() > best[0]:
            best = (int(whole - tokens.min()), order, int(sizes[tokens.argmin()]))
    return best
