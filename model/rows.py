"""The rows of a micro-batch in memory.

End to end, without padding: token tensors have the shape (N, D), N being the sum of the rows' lengths, filled up with
tokens that belong to no row, so that products meet few sizes (`limits.filled_tokens`). Everything but attention works on
single tokens and needs to know no more; attention by torch's operations lays rows of like length side by side (`model.padded_attention`).
So short rows cost what they are worth, and several rows in one sequence ("packing") need no masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from devices.base import place


@dataclass(frozen=True)
class Rows:
    """Where each row begins and ends among N tokens.

    Args:
        lengths: tokens of each row, B numbers, each at least 1.
        keys: (B,) int64, one random number a row; all its dropout masks come from it. None: no dropout is possible.
        filler: tokens after the last row that belong to none: nothing attends to them, no label judges them.
    Memory: indices are made when first asked for and live as long as the rows: 8 bytes a token each.
    """

    lengths: tuple[int, ...]
    keys: Tensor | None = None
    filler: int = 0

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each row begins: B numbers."""
        return tuple((np.cumsum(self.lengths) - self.lengths).tolist())

    @cached_property
    def row_tokens(self) -> int:
        """Tokens of all rows, without the filler."""
        return sum(self.lengths)

    @property
    def num_tokens(self) -> int:
        """N: tokens of all rows and the filler."""
        return self.row_tokens + self.filler

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @cached_property
    def _made(self) -> dict[Any, Any]:
        """What has been made of these rows, by name and device."""
        return {}

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for these rows and kept as long as they live."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def latest(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """The same for something of which only the last one asked for is kept."""
        if self._made.get(name, (None,))[0] != key:
            self._made.pop(name, None)  # before the next one is made
            self._made[name] = key, make()
        return self._made[name][1]

    def _index(self, name: str, device: torch.device, make: Callable[[], NDArray[np.int64]]) -> Tensor:
        return self.cached((name, device), lambda: place(torch.from_numpy(make()), device))  # type: ignore[no-any-return]

    def row_of_token(self, device: torch.device) -> Tensor:
        """(N,) int64: the row that each token belongs to; the filler counts to the last one."""

        def make() -> NDArray[np.int64]:
            counts = np.array(self.lengths, np.int64)
            counts[-1] += self.filler
            return np.repeat(np.arange(len(counts)), counts)

        return self._index("row", device, make)

    def positions(self, device: torch.device) -> Tensor:
        """(N,) int64: each token's place inside its row."""

        def make() -> NDArray[np.int64]:
            starts = np.repeat(np.array(self.starts, np.int64), self.lengths)
            starts = np.pad(starts, (0, self.filler), mode="edge")
            return np.arange(self.num_tokens) - starts

        return self._index("position", device, make)

    def mixed_positions(self, factor: int, device: torch.device) -> Tensor:
        """(N,) int64: the positions times a number, wrapped; made on the host."""

        def make() -> NDArray[np.int64]:
            positions: NDArray[np.int64] = self.positions(torch.device("cpu")).numpy()
            return positions * np.int64(factor)

        return self._index(f"position times {factor}", device, make)

    def flatten(self, padded: Tensor) -> Tensor:
        """Lay the valid tokens of (B, L, ...) end to end, the filler being zeros: (N, ...)."""
        width = padded.shape[1]

        def make() -> NDArray[np.int64]:
            rows = np.repeat(np.arange(len(self.lengths)), self.lengths) * width
            return rows + np.arange(self.row_tokens) - np.repeat(np.array(self.starts, np.int64), self.lengths)

        flat = padded.flatten(0, 1)[self._index(f"flat {width}", padded.device, make)]
        return torch.cat([flat, flat.new_zeros(self.filler, *flat.shape[1:])]) if self.filler else flat

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """What belongs to each row of (N, ...): B tensors."""
        return values[: self.row_tokens].split(self.lengths)


def places_of(
    rows: Rows, members: tuple[int, ...], length: int, size: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(size, length): the token of each place of rows laid side by side, and whether there is one; where not, some token's number."""
    starts, lengths = np.zeros((size, 1), np.int64), np.zeros((size, 1), np.int64)
    starts[: len(members), 0] = [rows.starts[row] for row in members]
    lengths[: len(members), 0] = [rows.lengths[row] for row in members]
    places = np.arange(length)[None]
    there = places < lengths
    return starts + np.where(there, places, 0), there
