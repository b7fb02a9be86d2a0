"""How do the gradients of tokens become that of their embedding? Each row of the table gets one sum, formed in fp32.

Adding token by token into a table in bf16 rounds each time: a token that comes a thousand times loses up to half of its
gradient; and on a GPU additions come in the order of its threads, also in fp32. So the tokens' gradients are summed in
fp32 over the distinct tokens alone, in an order that does not change, and rounded once. Adding row by row in fp32 on a
CPU does just that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from limits import SUMMED_ELEMENTS


def add_token_gradients(table: Tensor, ids: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add the gradients of all tokens to the rows of a table, in place.

    Args:
        table: (V, D) gradient of the embedding.
        ids: (N,) int64 of each micro-batch. gradients: (N, D) of each.
    Memory: 16 MB; beside the table and the gradients, nothing as wide as D.
    """
    if table.dtype == torch.float32 and table.device.type != "cuda":
        for rows, part in zip(ids, gradients, strict=True):
            table.index_add_(0, rows, part.to(table.dtype))
        return
    distinct, places = torch.cat(list(ids)).unique(return_inverse=True)
    width = max(1, SUMMED_ELEMENTS // len(places))
    for first in range(0, table.shape[1], width):
        columns = slice(first, first + width)
        slab = torch.cat([part[:, columns].float() for part in gradients])
        # what autograd forms after a lookup, over the distinct tokens alone: it sorts, and sums without atomics
        sums = torch.ops.aten.embedding_dense_backward(slab, places, len(distinct), -1, False)
        there = table[:, columns]
        there[distinct] = sums.add_(there[distinct]).to(table.dtype)
