"""SinkGD: no state for the matrices of the blocks. Their gradient is normalised over rows and columns in turn instead.

Dividing every row by its norm, then every column, and again, is Sinkhorn's iteration on the squared gradient; it ends in a
matrix whose rows and columns all have RMS 1, which does for a single gradient what second moments do over many. Each turn
only changes a factor for every row and column, so the matrix itself is never written: a turn is two products of the
squared gradient with a vector, in one pass of row chunks. As elsewhere here, the step is scaled by the weight's own RMS.
Embedding, head, bias tables and vectors, whose gradients have empty rows or no second side, take Adafactor's way.
Source: Scetbon et al. 2025 (arXiv 2502.06742), algorithm 3 (SR-Sinkhorn, five turns); the scaling by RMS is Adafactor's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.optimizers.adafactor import Adafactor
from engine.optimizers.base import Step, at_least, row_chunks, subtract_
from engine.optimizers.together import EPSILON_SCALE, State, Together
from model.shapes import is_block_matrix

TURNS = 5
LEAST_SQUARE = 1e-30  # sum of squares below which a row or column counts as empty


class SinkGD(Adafactor):
    """State: none for matrices of blocks, Adafactor's for the rest. Memory of an update: two chunks."""

    @classmethod
    def state_bytes(cls, shape: tuple[int, ...], name: str = "") -> int:
        """Adafactor's, of what is no matrix of a block."""
        return 0 if is_block_matrix(name, shape) else super().state_bytes(shape, name)

    def rule(self, name: str, shape: tuple[int, ...]) -> type[Together] | None:
        return SinkGDTogether if is_block_matrix(name, shape) else super().rule(name, shape)

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


class SinkGDTogether(Together):
    """Many matrices by few kernels. Memory: three fp32 copies of them."""

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor], state: dict[str, Tensor]) -> None:
        super().__init__(names, weights, state)
        self.inverse = self.inverse_counts()
        self.rows = sum(a.shape[0] * a.shape[1] for a in self.alike)

    def parts_of_state(self, weights: Sequence[tuple[str, tuple[int, ...]]]) -> list[State]:
        return []

    def change(self, wide: Tensor, grad: Tensor, steps: Sequence[Step]) -> Tensor:
        rate = self.scales(wide, steps)
        factors, update = self._balance(grad)
        for a in self.alike:
            part = torch.mul(a.numbers(grad), a.of_rows(factors).unsqueeze(2), out=a.numbers(update))
            part.mul_(a.of_columns(factors).unsqueeze(1))
        self.decay_(wide, steps)
        self.subtract_(wide, update, rate)
        return rate

    def _balance(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of all rows and then of all columns, by which gradients get rows and columns of RMS 1; and a buffer.

        By sums of plain products: matrix products would round the squares on their way (TF32).
        """
        square = grad.to(torch.float32, copy=True).square_()
        product, both = torch.empty_like(square), torch.ones_like(self.inverse)
        sides = [(slice(0, self.rows), 2), (slice(self.rows, None), 1)]
        for _ in range(TURNS):
            for side, dim in sides:
                for a in self.alike:
                    here, other = (a.of_rows(both), a.of_columns(both))[:: 1 if dim == 2 else -1]
                    torch.mul(a.numbers(square), other.unsqueeze(3 - dim), out=a.numbers(product))
                    torch.sum(a.numbers(product), dim=dim, out=here)
                both[side].clamp_(min=LEAST_SQUARE).mul_(self.inverse[side]).reciprocal_()
        return both.sqrt_(), product
