"""The rows of a micro-batch in memory.

Token tensors have the shape (N, D): everything but attention works on single tokens. Where compiled kernels attend,
rows lie end to end without padding. Elsewhere they are dense: rows of like length form a group, padded to one length,
and groups lie end to end, so that a group is a view (rows, length, D) of its tokens (`model.row_groups`). Last come
tokens that belong to no row, so that products meet few sizes.
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
        lengths: tokens of each row, B numbers, each at least 1.
        keys: (B,) int64 on the host, one random number a row, from which what is dropped follows. None: no dropout is
            possible.
        filler: tokens at the end that belong to no row: nothing attends to them, no label judges them.
        groups: how rows lie padded side by side; empty: they lie end to end without padding.
    Memory: indices are made when first asked for and live as long as the rows: 8 bytes a token each.
    """

    lengths: tuple[int, ...]
    keys: Tensor | None = None
    filler: int = 0
    groups: tuple[PaddedGroup, ...] = ()

    @cached_property
    def layout(self) -> tuple[PaddedGroup, ...]:
        """The groups in which rows attend; without padding each row is one of its own."""
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
    def _made(self) -> dict[Any, Any]:
        """What has been made of these rows, by name and device."""
        return {}

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for these rows and kept as long as they live."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _sent(self, name: str, device: torch.device, make: Callable[[], NDArray[Any]]) -> Tensor:
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
        """(N,) int64: the row that each token belongs to; the filler counts to the last one."""
        return self._sent("row", device, lambda: self._row_of_token)

    def positions(self, device: torch.device) -> Tensor:
        """(N,) int64: each token's place inside its row."""
        return self._sent("position", device, lambda: self._positions)

    def is_padding(self, device: torch.device) -> Tensor:
        """(N,) bool: which tokens are padding or filler."""
        return self._sent("padding", device, lambda: self._is_padding)

    def flatten(self, padded: Tensor, fill: int = 0) -> Tensor:
        """Lay the tokens of (B, L, ...) as these rows lie, with `fill` for padding and filler: (N, ...)."""
        last = padded.shape[1] - 1
        device = padded.device
        rows = self.row_of_token(device)
        positions = self._sent(f"place up to {last}", device, lambda: np.minimum(self._positions, last))
        is_padding = self.is_padding(device).view(-1, *[1] * (padded.dim() - 2))
        return padded[rows, positions].masked_fill(is_padding, fill)

    def tokens(self, values: Tensor) -> Tensor:
        """The tokens of (N, ...), row after row, without padding and filler: (tokens of all rows, ...)."""
        if not self.groups:
            return values[: self.row_tokens]
        return values.index_select(0, self.token_index(values.device, self.row_tokens))

    def token_index(self, device: torch.device, size: int) -> Tensor:
        """(size,) int64: where the tokens lie, row after row, and zeros behind the last."""

        def make() -> NDArray[np.int64]:
            ends = np.cumsum(self.lengths)
            shifts = np.array(self.starts, np.int64) - (ends - self.lengths)
            index = np.arange(self.row_tokens) + np.repeat(shifts, self.lengths)
            return np.pad(index, (0, size - self.row_tokens))

        return self._sent(f"token of {size}", device, make)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """What belongs to each row of (N, ...): B tensors."""
        return self.tokens(values).split(self.lengths)


def side_by_side(lengths: tuple[int, ...], keys: Tensor | None = None) -> Rows:
    """Dense rows in one group, in their order."""
    return _dense_rows(lengths, [tuple(range(len(lengths)))], keys, few_shapes=False)


def dense_sides(
    sources: tuple[int, ...], targets: tuple[int, ...], keys: Tensor, few_shapes: bool = False
) -> tuple[Rows, Rows]:
    """Dense rows of both sides, in the same groups, so that little is padded.

    Args:
        sources: tokens of B rows.
        targets: tokens of their answers: of the first answer of each row, of the second, ... The answers of a row lie
            beside each other.
        keys: (B,) of the rows.
        few_shapes: whether libraries of the device keep something for each number of tokens or rows.
    """
    count = len(sources)
    answers = [range(first, first + count) for first in range(0, len(targets), count)]
    groups = share_out([sources, *([targets[row] for row in rows] for rows in answers)], few_shapes)
    target_groups = [tuple(rows[row] for row in group for rows in answers) for group in groups]
    of_answers = keys.repeat(len(answers))
    return (
        _dense_rows(sources, groups, keys, few_shapes),
        _dense_rows(targets, target_groups, of_answers, few_shapes),
    )


def _dense_rows(
    lengths: tuple[int, ...], groups: Sequence[tuple[int, ...]], keys: Tensor | None, few_shapes: bool
) -> Rows:
    longest = np.array([max(lengths[row] for row in group) for group in groups])
    padded = tuple(map(PaddedGroup, groups, padded_widths(longest).tolist()))
    tokens = sum(group.size for group in padded)
    return Rows(lengths, keys, padded_size(tokens, few_shapes) - tokens, padded)
