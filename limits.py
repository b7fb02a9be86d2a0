"""Which sizes do tiles, chunks and fillings have? The one place that the engine and its plan read them from.

Whatever reaches the kernels of a backend comes from a small set of sizes: CPU libraries, MPS and compilers keep
something for each new one. Lengths of attention and sums of tokens are therefore rounded up on scales that grow
geometrically. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TILE_ELEMENTS = 512 * 1024  # scores of a tile: 2 MB in fp32, so that its few buffers stay in the second-level cache
LEAST_LENGTH = 8  # of queries and keys in a tile
FINE_LENGTH = 64  # from here on two sizes an octave, below one
LEAST_FILLED = 64  # tokens of a micro-batch
FILLED_PER_OCTAVE = 8  # sizes of token sums between a power of two and the next


def padded_length(length: int) -> int:
    """Queries or keys of a row, rounded up: 8, 16, 32, 64, 96, 128, 192, 256, 384, ..."""
    size = max(LEAST_LENGTH, 1 << (length - 1).bit_length())
    return size * 3 // 4 if size > FINE_LENGTH and length <= size * 3 // 4 else size


def filled_tokens(tokens: int) -> int:
    """Tokens of a micro-batch, rounded up: multiples of 64 to 512, then eight sizes an octave; at most an eighth more."""
    step = max(LEAST_FILLED, (1 << (tokens - 1).bit_length()) // 2 // FILLED_PER_OCTAVE)
    return -(-tokens // step) * step


@dataclass(frozen=True)
class RowGroup:
    """Rows of like length that pass through attention side by side.

    Args:
        rows: their numbers. places: for so many rows, a power of four. num_queries, num_keys: of each, padded.
        block: queries of a tile; fewer than `num_queries` only where there is one place.
    """

    rows: tuple[int, ...]
    places: int
    num_queries: int
    num_keys: int
    block: int


def row_groups(
    query_lengths: Sequence[int], key_lengths: Sequence[int], num_heads: int, width: int
) -> Iterator[RowGroup]:
    """Share rows out over groups, so that the scores of a tile and what is gathered for them keep to the tile's size.

    Args:
        query_lengths, key_lengths: tokens of each row. width: K, of a head.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for row, (queries, keys) in enumerate(zip(query_lengths, key_lengths, strict=True)):
        alike.setdefault((padded_length(queries), padded_length(keys)), []).append(row)
    for (queries, keys), rows in sorted(alike.items()):
        places, first = _most_places(num_heads, width, queries, keys), 0
        while first < len(rows):
            left = len(rows) - first
            while places > 1 and 2 * left <= places:  # so that more than half of the places are used
                places //= 4
            members = tuple(rows[first : first + places])
            yield RowGroup(members, places, queries, keys, _block(num_heads, queries, keys))
            first += places


def _most_places(num_heads: int, width: int, num_queries: int, num_keys: int) -> int:
    of_one = num_heads * max(num_queries * num_keys, (num_queries + 2 * num_keys) * width)
    most = max(1, TILE_ELEMENTS // of_one)
    return 1 << (most.bit_length() - 1) // 2 * 2


def _block(num_heads: int, num_queries: int, num_keys: int) -> int:
    """Queries of a tile: all of a row, or a power of two that keeps the scores in the tile's size."""
    most = TILE_ELEMENTS // (num_heads * num_keys)
    return num_queries if num_queries <= most else 1 << max(LEAST_LENGTH, most).bit_length() - 1
