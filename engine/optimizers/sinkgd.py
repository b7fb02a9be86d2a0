"""SinkGD: no state for the matrices of the blocks. Their gradient is normalised over rows and columns in turn instead.

Dividing every row by its norm, then every column, and again, is Sinkhorn's iteration on the squared gradient; it ends in a
matrix whose rows and columns all have RMS 1, which does for a single gradient what second moments do over many. Each turn
only changes a factor for every row and column, so the matrix itself is never written: a turn is two products of the
squared gradient with a vector, in one pass of row chunks. As elsewhere here, the step is scaled by the weight's own RMS.
Embedding, head, bias tables and vectors, whose gradients have empty rows or no second side, are updated as by Adafactor.
Source: Scetbon et al. 2025 (arXiv 2502.06742), algorithm 3 (SR-Sinkhorn, five turns); the scaling by RMS is Adafactor's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.optimizers.adafactor import Adafactor
from engine.optimizers.base import Group, StateLayout
from model.shapes import is_block_matrix

TURNS = 5
LEAST_SQUARE = 1e-30  # sum of squares below which a row or column counts as empty


class SinkGD(Adafactor):
    """State: none for matrices of blocks, Adafactor's for the rest. Memory of an update: two chunks."""

    def layout(self, name: str, shape: tuple[int, ...]) -> StateLayout:
        return {} if is_block_matrix(name, shape) else super().layout(name, shape)

    def _update(self, group: Group) -> None:
        if not group.is_block_matrix:
            return super()._update(group)
        grad = group.grad
        n, m = grad.shape[1:]
        row_square = torch.empty(grad.shape[:2], device=grad.device)
        column_square = torch.ones(len(grad), m, device=grad.device)
        for _ in range(TURNS):
            total = torch.zeros_like(column_square)
            for rows in group.chunks():
                square = group.gradient(rows).square()
                row_square[:, rows] = m / _times(square, column_square).clamp_(min=LEAST_SQUARE)
                total.add_(_times(square.mT, row_square[:, rows]))
            column_square = n / total.clamp_(min=LEAST_SQUARE)
        row_factor, column_factor = row_square.sqrt_().unsqueeze(2), column_square.sqrt_().unsqueeze(1)
        rate = group.scaled_rate()
        for rows in group.chunks():
            update = group.gradient(rows) * row_factor[:, rows]
            group.subtract(rows, update.mul_(column_factor), rate)


def _times(x: Tensor, vector: Tensor) -> Tensor:
    """(count, n, m) by (count, m): (count, n); several by sums, as products of many would round squares on their way (TF32)."""
    return torch.mv(x[0], vector[0]).unsqueeze(0) if len(x) == 1 else (x * vector.unsqueeze(1)).sum(2)
