"""Which row stands at which place of an endless run through the data?

Every epoch is a keyed permutation of the rows: a Feistel network over the next even number of bits, walked along its
cycle until it lands inside the range (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). So the order is a
pure function of (seed, position): nothing is stored, a resume is one integer, and any number of processes sees one
order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers one to one (the finaliser of SplitMix64, Steele et al. 2014).

    Args:
        values: any shape, uint64.
    Returns:
        the same shape, uint64.
    """
    with np.errstate(over="ignore"):
        values = values + _GOLDEN
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def row_keys(seed: int, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Give each place of the run its own random key, from which its masks and its dropout follow.

    Args:
        seed: 0 or more.
        positions: (N,) global sample positions, over all epochs.
    Returns:
        (N,) uint64.
    """
    return mix(mix(np.full(len(positions), seed, np.uint64)) ^ positions.astype(np.uint64))


class Order:
    """The order of rows over endless epochs, each epoch shuffled anew.

    Args:
        num_rows: rows of one epoch, 1 or more.
        seed: 0 or more; another seed is another order.
    Memory:
        O(1); `rows` allocates O(count).
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows = {num_rows}, must be 1 or more")
        self.num_rows, self.seed = num_rows, seed
        self._half_bits = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))

    def rows(self, position: int, count: int) -> NDArray[np.int64]:
        """Say which rows stand at places position .. position + count.

        Args:
            position: first global sample position, 0 or more, counted over all epochs.
            count: 0 or more.
        Returns:
            (count,) int64, each in 0 .. num_rows - 1.
        """
        places = np.arange(position, position + count, dtype=np.int64)
        epochs, inside = np.divmod(places, self.num_rows)
        keys = mix(mix(np.full(count, self.seed, np.uint64)) ^ epochs.astype(np.uint64))
        values = self._encrypt(inside.astype(np.uint64), keys)
        outside = np.flatnonzero(values >= self.num_rows)
        while len(outside):  # each turn lands inside with a chance of at least a quarter
            values[outside] = self._encrypt(values[outside], keys[outside])
            outside = outside[values[outside] >= self.num_rows]
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = self._half_bits
        mask = (np.uint64(1) << bits) - np.uint64(1)
        left, right = values >> bits, values & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (mix(right ^ keys ^ np.uint64(turn << 56)) & mask)
        return (left << bits) | right
