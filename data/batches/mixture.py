"""The source of each row of a run, where several sources are mixed by weight.

Positions are cut into turns of 65,536, and each source has a fixed quota of a turn, by its weight. Which position of a
turn belongs to which source is a keyed permutation of the turn; so the mixture is exact over a turn, even within it,
and a pure function of (seed, position) like `Order`, which gives the rows of each source: none comes twice before all
came once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.batches.order import Order, mix, permute, row_keys
from settings.errors import UserError
from settings.fields import counted
from support.language import join

TURN = 2**16


def named_weights(text: str, parts: Sequence[str]) -> list[float]:
    """Read the weights of `--mixture_weights`, separated by commas.

    Args:
        parts: names of the parts of the training data.
    Raises:
        UserError: they are no weights, or not one for each part.
    """
    try:
        weights = np.array(str(text).strip("()[] ").split(","), np.float64)
    except ValueError:
        weights = np.zeros(1)
    if not ((weights > 0) & np.isfinite(weights)).all():
        raise UserError("--mixture_weights = {text}, is not a list of weights above 0; write it as 0.7,0.3", text=text)
    if len(weights) != len(parts):
        raise UserError(
            "--mixture_weights = {text}, has {weights} for {parts} of the training data ({other_parts}); give "
            "one for each part of --train_file, separated by commas",
            text=text,
            weights=counted(len(weights), "weight"),
            parts=counted(len(parts), "part"),
            other_parts=join(", ", parts),
        )
    return list(weights.tolist())


def quotas(weights: Sequence[float]) -> list[int]:
    """Part a turn by weights: at least 1 for each, the largest remainders get what is left."""
    shares = np.array(weights, np.float64) / sum(weights) * TURN
    parts = np.maximum(np.floor(shares).astype(np.int64), 1)
    by_remainder = np.argsort(-(shares - parts), kind="stable")
    parts[by_remainder[: max(0, TURN - int(parts.sum()))]] += 1
    parts[int(np.argmax(parts))] += TURN - int(parts.sum())
    return list(parts.tolist())


class Mixture:
    """The order of rows over several sources, one after the other.

    Args:
        sizes: rows of each source, 1 or more.
        weights: one for each source, above 0.
        seed, block_rows: as of `Order`.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, block_rows: int = 0) -> None:
        assert len(sizes) == len(weights)
        self.num_rows = sum(sizes)
        self.seed = seed
        self.quotas = quotas(weights)
        self._begins = np.cumsum([0, *self.quotas])
        self._firsts = np.cumsum([0, *sizes])
        seeds = mix(np.arange(len(sizes), dtype=np.uint64) ^ mix(np.full(len(sizes), seed, np.uint64)))
        self._orders = [Order(size, int(own), block_rows) for size, own in zip(sizes, seeds, strict=True)]

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which rows stand at positions (count,) of the run, counted through all sources: (count,) int64."""
        turns, inside = np.divmod(positions, TURN)
        slots = permute(inside.astype(np.uint64), TURN, row_keys(self.seed, turns))
        sources = np.searchsorted(self._begins, slots, side="right") - 1
        rows = np.empty(len(positions), np.int64)
        for number in np.unique(sources):
            is_own = sources == number
            own = turns[is_own] * self.quotas[number] + slots[is_own] - self._begins[number]
            rows[is_own] = self._firsts[number] + self._orders[number].rows(own)
        return rows
