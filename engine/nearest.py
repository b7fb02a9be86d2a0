"""The vectors that are most alike to queries, exactly: all cosines are formed, block by block, and the best are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

QUERIES = 256  # So many look at a block at a time,
BLOCK_ROWS = 8192  # which has so many vectors: their cosines take 8 MiB.
Hide = Callable[[Tensor, Tensor], None]
NONE = -1  # The number in place of a vector where there are fewer than were asked for.


def nearest(
    queries: Tensor, blocks: Iterable[tuple[Tensor, Tensor]], count: int, hide: Hide | None = None
) -> tuple[Tensor, Tensor]:
    """The vectors with the highest cosines.

    Args:
        queries: (Q, V) fp32 of length 1.
        blocks: numbers (n,) int64 of vectors, and these (n, V) fp32, of length 1.
        count: K, how many are wanted for each query.
        hide: sets cosines (Q, n) with a block, which it gets with the numbers of the vectors (n,), to -inf where a
            vector shall not be found.
    Returns:
        cosines (Q, K), best first, -inf where there are fewer vectors, and the numbers of the vectors (Q, K), there
        `NONE`.
    Memory: the cosines of all queries with a block three times, and 24 bytes x Q x K.
    """
    cosines = queries.new_full((len(queries), count), -torch.inf)
    numbers = torch.full_like(cosines, NONE, dtype=torch.int64)
    for block_numbers, vectors in blocks:
        of_block = queries @ vectors.T
        if hide is not None:
            hide(of_block, block_numbers)
        best, places = of_block.topk(min(count, len(vectors)))
        candidates = torch.cat([numbers, block_numbers[places]], dim=1)
        cosines, places = torch.cat([cosines, best], dim=1).topk(count)
        numbers = candidates.gather(1, places)
    return cosines, numbers.masked_fill(cosines == -torch.inf, NONE)


def blocks_of(vectors: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Vectors (N, V) in memory as blocks, numbered by their rows."""
    numbers = torch.arange(len(vectors), device=vectors.device)
    yield from zip(numbers.split(BLOCK_ROWS), vectors.split(BLOCK_ROWS), strict=True)
