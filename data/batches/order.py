"""The row at each place of an endless run through the data.

Every epoch is a keyed permutation of the rows: a Feistel network over the next even number of bits, walked along its
cycle until it lands inside the range (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). So the order is a
pure function of (seed, position): nothing is stored, a resume is one integer, and any number of processes sees one
order.

For files larger than memory, where each read at random is a read of the disk, `block_rows` keeps neighbours together:
blocks of rows are permuted, and rows within windows of 64 blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
WINDOW_BLOCKS = 64
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
    """Give each position of the run its own random key, from which its masks and its dropout follow.

    Args:
        seed: 0 or more.
        positions: (N,) global sample positions, over all epochs.
    Returns:
        (N,) uint64.
    """
    return mix(mix(np.full(len(positions), seed, np.uint64)) ^ positions.astype(np.uint64))


def permute(values: NDArray[np.uint64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Map numbers below `size` one to one onto themselves.

    Args:
        values: (N,) below `size`. keys: (N,) uint64; equal keys belong to one permutation.
    Returns:
        (N,) int64, each in 0 .. size - 1.
    """
    bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    values = _encrypt(values, keys, bits)
    outside = np.flatnonzero(values >= size)
    while len(outside):  # Each turn lands inside with a chance of at least a quarter.
        values[outside] = _encrypt(values[outside], keys[outside], bits)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _encrypt(values: NDArray[np.uint64], keys: NDArray[np.uint64], bits: np.uint64) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << bits) - np.uint64(1)
    upper = values >> bits
    lower = values & mask
    for turn in range(ROUNDS):
        scrambled = upper ^ (mix(lower ^ keys ^ np.uint64(turn << 56)) & mask)
        upper = lower
        lower = scrambled
    return (upper << bits) | lower


class Order:
    """The order of rows over endless epochs, each epoch shuffled anew.

    Args:
        num_rows: rows of one epoch, 1 or more.
        seed: 0 or more; another seed is another order.
        block_rows: rows that stay neighbours; 0: none do.
    Memory:
        O(1); `rows` allocates O(count).
    """

    def __init__(self, num_rows: int, seed: int, block_rows: int = 0) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows = {num_rows}, must be 1 or more")
        self.num_rows = num_rows
        self.seed = seed
        self.block_rows = block_rows if num_rows > block_rows * WINDOW_BLOCKS else 0

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which rows stand at positions of the run.

        Args:
            positions: (count,) 0 or more, counted over all epochs.
        Returns:
            (count,) int64, each in 0 .. num_rows - 1.
        """
        epochs, inside = np.divmod(positions, self.num_rows)
        keys = row_keys(self.seed, epochs)
        if not self.block_rows:
            return permute(inside.astype(np.uint64), self.num_rows, keys)
        return self._in_blocks(inside, keys)

    def _in_blocks(self, inside: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Shuffle within windows of whole blocks, then say where each block lies; a last, shorter block stays last."""
        blocks = self.num_rows // self.block_rows
        window_rows = WINDOW_BLOCKS * self.block_rows
        last_window = (blocks - 1) // WINDOW_BLOCKS
        windows = np.minimum(inside // window_rows, last_window)
        shuffled = np.empty_like(inside)
        for window in np.unique(windows).tolist():
            in_window = windows == window
            begin = window * window_rows
            size = self.num_rows - begin if window == last_window else window_rows
            window_keys = mix(keys[in_window] ^ np.uint64(window + 1))
            shuffled[in_window] = begin + permute((inside[in_window] - begin).astype(np.uint64), size, window_keys)
        block, offset = np.divmod(shuffled, self.block_rows)
        whole = block < blocks
        block[whole] = permute(block[whole].astype(np.uint64), blocks, keys[whole])
        return block * self.block_rows + offset
