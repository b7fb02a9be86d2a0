"""The rows of a micro-batch in memory.

Token tensors have the shape (N, D): everything but attention works on single tokens. Where compiled kernels compute
attention, rows lie end to end without padding. Elsewhere they are dense: rows of similar length form a group, padded to
one length, and groups lie end to end, so that a group is a view (rows, length, D) of its tokens (`model.row_groups`).
Filler tokens, which belong to no row, round N up at the end, so that matrix products see few different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from devices.base import place
from model.row_groups import PaddedGroup, padded_size, padded_widths, share_out


@dataclass(frozen=True)
class Rows:
    """Where each row begins and ends among N tokens.

    Args:
        lengths: number of tokens of each of the B rows, each at least 1.
        keys: (B,) int64 on the host, one random key per row, which determines the row's dropout masks. None: dropout
            cannot be used.
        filler: number of tokens at the end that belong to no row: they are never attended to and have no label.
        groups: the padded groups of dense rows; empty: rows lie end to end without padding.
    Memory: index tensors are made on first use and kept as long as the rows: 8 bytes a token each.
    """

    lengths: tuple[int, ...]
    keys: Tensor | None = None
    filler: int = 0
    groups: tuple[PaddedGroup, ...] = ()

    @cached_property
    def layout(self) -> tuple[PaddedGroup, ...]:
        """The groups that attention processes; without padding, each row is a group by itself."""
        return self.groups or tuple(PaddedGroup((row,), length) for row, length in enumerate(self.lengths))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each row begins: B numbers."""
        starts = [0] * len(self.lengths)
        begin = 0
        for group in self.layout:
            for row in group.rows:
                starts[row] = begin
                begin += group.width
        return tuple(starts)

    @cached_property
    def row_tokens(self) -> int:
        """Tokens of all rows, without padding and filler."""
        return sum(self.lengths)

    @cached_property
    def num_tokens(self) -> int:
        """N: tokens of all rows with their padding, and the filler."""
        return sum(group.size for group in self.layout) + self.filler

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row, with its padding."""
        return max(group.width for group in self.layout)

    def is_full(self, group: PaddedGroup) -> bool:
        """Whether no row of a group is padded."""
        return all(self.lengths[row] == group.width for row in group.rows)

    @cached_property
    def _cache(self) -> dict[Any, Any]:
        """Everything derived from these rows so far, by the key given to `cached`."""
        return {}

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, which is called once per key and kept as long as the rows."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def _cached_on(self, name: str, device: torch.device, make: Callable[[], NDArray[Any]]) -> Tensor:
        tensor: Tensor = self.cached((name, device), lambda: place(torch.from_numpy(make()), device))
        return tensor

    @cached_property
    def _row_of_token(self) -> NDArray[np.int64]:
        rows = [np.repeat(np.array(group.rows, np.int64), group.width) for group in self.layout]
        return np.concatenate([*rows, np.full(self.filler, self.layout[-1].rows[-1], np.int64)])

    @cached_property
    def _positions(self) -> NDArray[np.int64]:
        return np.arange(self.num_tokens) - np.array(self.starts, np.int64)[self._row_of_token]

    @cached_property
    def _is_padding(self) -> NDArray[np.bool_]:
        return self._positions >= np.array(self.lengths, np.int64)[self._row_of_token]

    def row_of_token(self, device: torch.device) -> Tensor:
        """(N,) int64: the row that each token belongs to; filler tokens get that of the last token before them."""
        return self._cached_on("row", device, lambda: self._row_of_token)

    def positions(self, device: torch.device) -> Tensor:
        """(N,) int64: each token's position inside its row."""
        return self._cached_on("position", device, lambda: self._positions)

    def is_padding(self, device: torch.device) -> Tensor:
        """(N,) bool: which tokens are padding or filler."""
        return self._cached_on("padding", device, lambda: self._is_padding)

    def flatten(self, padded: Tensor, fill: int = 0) -> Tensor:
        """Lay out a padded batch (B, L, ...) like these rows, as (N, ...), with `fill` in padding and filler."""
        last = padded.shape[1] - 1
        device = padded.device
        rows = self.row_of_token(device)
        # Padding may be longer here than in the batch; what it reads is overwritten with `fill`.
        positions = self._cached_on(f"position up to {last}", device, lambda: np.minimum(self._positions, last))
        is_padding = self.is_padding(device).view(-1, *[1] * (padded.dim() - 2))
        return padded[rows, positions].masked_fill(is_padding, fill)

    def tokens(self, values: Tensor) -> Tensor:
        """The tokens of (N, ...), row after row, without padding and filler: (tokens of all rows, ...)."""
        if not self.groups:
            return values[: self.row_tokens]
        return values.index_select(0, self.token_index(values.device, self.row_tokens))

    def token_index(self, device: torch.device, size: int) -> Tensor:
        """(size,) int64: the index of each token, row after row, without padding; then zeros up to `size`."""

        def make() -> NDArray[np.int64]:
            ends = np.cumsum(self.lengths)
            # The start of each row in this layout, relative to its start if rows had no padding:
            shifts = np.array(self.starts, np.int64) - (ends - self.lengths)
            index = np.arange(self.row_tokens) + np.repeat(shifts, self.lengths)
            return np.pad(index, (0, size - self.row_tokens))

        return self._cached_on(f"token of {size}", device, make)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Split (N, ...) into the B rows, without padding and filler."""
        return self.tokens(values).split(self.lengths)


def one_padded_group(lengths: tuple[int, ...], keys: Tensor | None = None) -> Rows:
    """Dense rows in a single group: all padded to the longest, in the given order."""
    return _dense_rows(lengths, [tuple(range(len(lengths)))], keys, few_shapes=False)


def dense_sides(
    sources: tuple[int, ...], targets: tuple[int, ...], keys: Tensor, few_shapes: bool = False
) -> tuple[Rows, Rows]:
    """Dense rows for encoder and decoder, grouped alike, with groups chosen so that there is little padding.

    Args:
        sources: source lengths of the B rows.
        targets: target lengths of their answers: the first answer of all B rows, then the second of all, and so on. In
            the layout, the answers of a row lie next to each other.
        keys: (B,) dropout keys of the source rows; all answers of a row get its key.
        few_shapes: whether to prefer few distinct shapes over little padding, as libraries cache something per shape.
    """
    count = len(sources)
    target_rows = [range(first, first + count) for first in range(0, len(targets), count)]  # One range for each answer.
    groups = share_out([sources, *([targets[row] for row in rows] for rows in target_rows)], few_shapes)
    target_groups = [tuple(rows[row] for row in group for rows in target_rows) for group in groups]
    target_keys = keys.repeat(len(target_rows))
    return (
        _dense_rows(sources, groups, keys, few_shapes),
        _dense_rows(targets, target_groups, target_keys, few_shapes),
    )


def _dense_rows(
    lengths: tuple[int, ...], groups: Sequence[tuple[int, ...]], keys: Tensor | None, few_shapes: bool
) -> Rows:
    longest = np.array([max(lengths[row] for row in group) for group in groups])
    padded = tuple(map(PaddedGroup, groups, padded_widths(longest).tolist()))
    tokens = sum(group.size for group in padded)
    return Rows(lengths, keys, padded_size(tokens, few_shapes) - tokens, padded)
