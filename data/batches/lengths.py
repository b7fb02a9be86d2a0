"""How long are the rows? A histogram of token lengths with exact extremes, in constant memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# 1, 2, 3, 4, 6, 8, 12, 16 ...: two buckets for each doubling
BOUNDS = np.array(sorted({1} | {2**n for n in range(1, 25)} | {3 * 2**n for n in range(24)}), np.int64)


@dataclass
class LengthCounts:
    """Token lengths of one column.

    Args:
        longest: of the rows as they are stored; longest_uncut: before they were cut; total: tokens stored.
        counts: rows per bucket; bucket i holds the lengths up to `BOUNDS[i]` that no earlier one holds.
    """

    longest: int = 0
    longest_uncut: int = 0
    total: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))

    def add(self, lengths: NDArray[np.int64], uncut: NDArray[np.int64]) -> None:
        """Count rows: (rows,) tokens as stored, and before cutting."""
        if len(lengths):
            self.longest = max(self.longest, int(lengths.max()))
            self.longest_uncut = max(self.longest_uncut, int(uncut.max()))
            self.total += int(lengths.sum())
            found = np.bincount(np.searchsorted(BOUNDS, lengths), minlength=len(self.counts))
            self.counts = (np.array(self.counts) + found).tolist()

    def facts(self) -> dict[str, Any]:
        """What the manifest says; `histogram` lists [longest length of the bucket, rows] without empty buckets."""
        rows = sum(self.counts)
        histogram = [[int(bound), count] for bound, count in zip(BOUNDS, self.counts, strict=False) if count]
        return {
            "longest": self.longest, "longest_uncut": self.longest_uncut,
            "mean": round(self.total / rows, 2) if rows else 0.0, "histogram": histogram,
        }  # fmt: skip
