"""How do the rows of a micro-batch lie in memory?

End to end, without padding: token tensors have the shape (N, D), N being the sum of the rows' lengths. Everything but
attention works on single tokens and needs to know no more; attention visits each row between its start and its end.
So short rows cost what they are worth, and several rows in one sequence ("packing") need no masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Where each row begins and ends among N tokens.

    Args:
        lengths: tokens of each row, B numbers, each at least 1.
        keys: (B,) int64, one random number a row; all its dropout masks come from it. None: no dropout is possible.
    """

    lengths: tuple[int, ...]
    keys: Tensor | None = None

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each row begins: B numbers."""
        starts, position = [], 0
        for length in self.lengths:
            starts.append(position)
            position += length
        return tuple(starts)

    @property
    def num_tokens(self) -> int:
        """N: tokens of all rows."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    def positions(self, device: torch.device) -> Tensor:
        """(N,) int64: each token's place inside its row."""
        return torch.cat([torch.arange(length, device=device) for length in self.lengths])

    def row_of_token(self, device: torch.device) -> Tensor:
        """(N,) int64: the row that each token belongs to."""
        return torch.repeat_interleave(
            torch.arange(len(self.lengths), device=device), torch.tensor(self.lengths, device=device)
        )

    def flatten(self, padded: Tensor) -> Tensor:
        """Lay the valid tokens of (B, L, ...) end to end: (N, ...)."""
        return torch.cat([padded[row, :length] for row, length in enumerate(self.lengths)])

    def pad(self, flat: Tensor, value: float = 0.0) -> Tensor:
        """Spread (N, ...) over (B, longest, ...), the rest filled with `value`."""
        padded = flat.new_full((len(self.lengths), self.longest, *flat.shape[1:]), value)
        for row, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            padded[row, :length] = flat[start : start + length]
        return padded
