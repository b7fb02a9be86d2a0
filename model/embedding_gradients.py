"""The gradient of an embedding from those of its tokens; each row's sum is formed in fp32.

Adding token by token into a table in bf16 rounds each time: a token that comes a thousand times loses up to half of its
gradient; and on a GPU additions come in the order of its threads, also in fp32. So the tokens' gradients are summed in
fp32 over the distinct tokens alone, in an order that does not change, and rounded once. Adding row by row in fp32 on a
CPU does just that. On a GPU sums of eight are formed, of those again, until there is one a token; which eight, the host
has worked out from the ids that it has sent there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from devices.base import is_host, place, traits_of
from devices.sizes import SUMMED_ELEMENTS

TOGETHER = 8  # A sum has so many terms.


def add_token_gradients(
    table: Tensor, ids: Sequence[Tensor], gradients: Sequence[Tensor], sums: TokenSums | None = None
) -> None:
    """Add the gradients of all tokens to the rows of a table, in place.

    Args:
        table: (V, D) gradient of the embedding.
        ids: (N,) int64 of each micro-batch. gradients: (N, D) of each. sums: of these ids, where they are known.
    Memory: 16 MB; beside the table and the gradients, nothing as wide as D.
    """
    if not is_host(table):
        sums = sums or TokenSums.of([part.cpu() for part in ids], table.device)
        return sums.add_to(table, gradients)
    if table.dtype == torch.float32:
        for rows, part in zip(ids, gradients, strict=True):
            table.index_add_(0, rows, part.to(table.dtype))
        return
    distinct, inverse = torch.cat(list(ids)).unique(return_inverse=True)
    width = max(1, SUMMED_ELEMENTS // len(inverse))
    for first in range(0, table.shape[1], width):
        columns = slice(first, first + width)
        slab = torch.cat([part[:, columns].float() for part in gradients])
        # Autograd forms this after a lookup, here over the distinct tokens alone: it sorts, and sums without atomics.
        parts = torch.ops.aten.embedding_dense_backward(slab, inverse, len(distinct), -1, False)
        there = table[:, columns]
        there[distinct] = parts.add_(there[distinct]).to(table.dtype)


@dataclass(frozen=True)
class TokenSums:
    """Which tokens are summed together, and which of those sums again.

    Args:
        distinct: (n,) int32, the tokens that occur. levels: (sums x 8,) int32 each, the terms of each sum: numbers of
            the tokens, or of the sums of the level before; one more than there are for none. The last has n sums.
    """

    distinct: Tensor
    levels: tuple[Tensor, ...]

    @classmethod
    def of(cls, ids: Sequence[Tensor], device: torch.device) -> TokenSums:
        """The sums of these tokens, which are on the host."""
        tokens = np.concatenate([part.numpy() for part in ids])
        distinct, counts = np.unique(tokens, return_counts=True)
        terms = np.argsort(tokens, kind="stable")
        levels: list[NDArray[np.int64]] = []
        while not levels or counts.max() > 1:
            level, counts = _level(terms, counts)
            levels.append(level)
            terms = np.arange(counts.sum())
        sent = [place(torch.from_numpy(x.ravel().astype(np.int32)), device) for x in (distinct, *levels)]
        return cls(sent[0], tuple(sent[1:]))

    def add_to(self, table: Tensor, gradients: Sequence[Tensor]) -> None:
        """Add to the table (V, D) the gradients (N, D) of each micro-batch. Memory: of a slab of columns, all terms and
        sums.
        """
        width = max(1, traits_of(table.device).summed_elements // max(len(level) for level in self.levels))
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        for first in range(0, table.shape[1], width):
            columns = slice(first, first + width)
            slab = [part[:, columns] for part in gradients]
            for level in self.levels:
                terms = torch.cat([*slab, slab[0].new_zeros(1, slab[0].shape[1])]).index_select(0, level)
                slab = [terms.unflatten(0, (-1, TOGETHER)).sum(1, dtype=wide)]
                del terms
            there = table[:, columns]
            sums = slab[0].add_(there.index_select(0, self.distinct)).to(table.dtype)
            there.index_copy_(0, self.distinct.long(), sums)


def _level(terms: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(sums, 8) terms, the number of all terms for none; and how many sums each token has.

    Args:
        terms: those of the first token, of the second, ... counts: how many each has.
    """
    sums = -(-counts // TOGETHER)
    starts = np.cumsum(counts) - counts
    firsts = np.cumsum(sums) - sums
    place_of = np.arange(len(terms)) - np.repeat(starts, counts)
    level = np.full((sums.sum(), TOGETHER), len(terms), np.int64)
    level[np.repeat(firsts, counts) + place_of // TOGETHER, place_of % TOGETHER] = terms
    return level, sums
