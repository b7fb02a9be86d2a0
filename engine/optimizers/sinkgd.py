"""SinkGD: no state for the matrices of the blocks. Their gradient is normalised over rows and columns in turn instead.

Dividing every row by its norm, then every column, and again, is Sinkhorn's iteration on the squared gradient; it ends in a
matrix whose rows and columns all have RMS 1, which does for a single gradient what second moments do over many. Each turn
only changes a factor for every row and column, so the matrix itself is never written: a turn is two products of the
squared gradient with a vector, in one pass of row chunks. As elsewhere here, the step is scaled by the weight's own RMS.
Embedding, head, bias tables and vectors, whose gradients have empty rows or no second side, take Adafactor's way.
Source: Scetbon et al. 2025 (arXiv 2502.06742), algorithm 3 (SR-Sinkhorn, five turns); the scaling by RMS is Adafactor's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.optimizers.adafactor import Adafactor
from engine.optimizers.base import Step, at_least, row_chunks, subtract_
from engine.optimizers.together import EPSILON_SCALE
from model.shapes import is_block_matrix

TURNS = 5
LEAST_SQUARE = 1e-30  # sum of squares below which a row or column counts as empty


class SinkGD(Adafactor):
    """State: none for matrices of blocks, Adafactor's for the rest. Memory of an update: two chunks."""

    @classmethod
    def state_bytes(cls, shape: tuple[int, ...], name: str = "") -> int:
        """Adafactor's, of what is no matrix of a block."""
        return 0 if is_block_matrix(name, shape) else super().state_bytes(shape, name)

    def _update(self, name: str, weight: Tensor, grad: Tensor, step: Step) -> None:
        if not is_block_matrix(name, tuple(weight.shape)):
            return super()._update(name, weight, grad, step)
        row_factor, column_factor = self._balance(name, grad)
        rate = step.learning_rate * at_least(EPSILON_SCALE, self._root_mean_square(name, weight))
        keep = 1.0 - step.learning_rate * step.weight_decay
        for rows in row_chunks(weight):
            update = grad[rows].float() * row_factor[rows].unsqueeze(1)
            values = subtract_(self._read(name, rows, weight).mul_(keep), update.mul_(column_factor), rate)
            self._write(name, rows, weight, values, step)

    def _balance(self, name: str, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of rows (n) and columns (m), fp32, by which the gradient gets rows and columns of RMS 1."""
        n, m = self._whole_rows(name, grad), grad.shape[1]
        row_square = torch.empty(grad.shape[0], device=grad.device)
        column_square = torch.ones(m, device=grad.device)
        for _ in range(TURNS):
            total = torch.zeros_like(column_square)
            for rows in row_chunks(grad):
                square = grad[rows].float().square()
                row_square[rows] = m / torch.mv(square, column_square).clamp_(min=LEAST_SQUARE)
                total.add_(torch.mv(square.t(), row_square[rows]))
            column_square = n / self._sum(name, total).clamp_(min=LEAST_SQUARE)
        return row_square.sqrt_(), column_square.sqrt_()
