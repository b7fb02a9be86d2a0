"""Muon: the momentum of a matrix with all its singular values brought to about 1, so that it learns in all directions alike.

A sum of gradients is dominated by a few directions, those of what is common; what is rare moves by little. Three polynomials
in X Xᵀ bring the singular values together without finding them. They are made of products, in the dtype of the gradient, and
differ, each being the best for where the one before has left the values: so they do in three turns what takes one and the same
polynomial five (docs/recipes.md). Here the step is scaled by the weight's RMS, but by that of the first step: scaled by what it
has become, a matrix all directions of which move grows faster the larger it is (to 80 times its size in 3,000 steps, where the
loss rose).
Matrices take 0.4 of the learning rate, at which the rest (embedding, head, bias tables and vectors, Adafactor's way) learns
best beside them (docs/recipes.md).
Source: Jordan et al. 2024, Muon (github.com/KellerJordan/Muon), for momentum and Nesterov's form; Amsel et al. 2025, The Polar
Express (arXiv 2505.16932), for how polynomials are chosen one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.optimizers.adafactor import Adafactor
from engine.optimizers.base import Step, row_chunks, subtract_
from engine.optimizers.together import EPSILON_SCALE, State, Together
from model.shapes import is_block_matrix
from optimizers import MUON_POLYNOMIALS

BETA = 0.95
MATRIX_RATE = 0.4
LEAST_NORM = 1e-15  # below which a gradient counts as empty


class Muon(Adafactor):
    """State: a bf16 number for each weight of the matrices of blocks and their first size, Adafactor's for the rest.

    Memory of an update: a copy of the matrix, three squares of its shorter side (of its columns, where rows
    lie on several processes), and three chunks.
    """

    @classmethod
    def state_bytes(cls, shape: tuple[int, ...], name: str = "") -> int:
        """Two bytes for each number of a matrix of a block, and four."""
        return 2 * shape[0] * shape[1] + 4 if is_block_matrix(name, shape) else super().state_bytes(shape, name)

    def rule(self, name: str, shape: tuple[int, ...]) -> type[Together] | None:
        return MuonTogether if is_block_matrix(name, shape) else super().rule(name, shape)

    def _update(self, name: str, weight: Tensor, grad: Tensor, step: Step) -> None:
        if not is_block_matrix(name, tuple(weight.shape)):
            return super()._update(name, weight, grad, step)
        update = self._moved(name, grad)
        n, m = self._whole_rows(name, weight), weight.shape[1]
        # rows may lie on several processes, columns never do: the square of the columns' side is a sum over all rows
        is_wide = n < m and self._part(name) is None
        self._orthogonalise(name, update.t() if is_wide else update)
        # singular values of 1 are an RMS of 1 / root of the longer side
        rate = self._size(name, weight) * (step.learning_rate * MATRIX_RATE * max(n, m) ** 0.5)
        keep = 1.0 - step.learning_rate * step.weight_decay
        for rows in row_chunks(weight):
            values = subtract_(self._read(name, rows, weight).mul_(keep), update[rows].float(), rate)
            self._write(name, rows, weight, values, step)

    def _size(self, name: str, weight: Tensor) -> float | Tensor:
        """The weight's RMS at its first step; of an adapter's matrix that began at zero, what it is now."""
        now = self._root_mean_square(name, weight)
        first = self._state(f"{name}/size", (1,), weight)
        if not isinstance(now, float):
            return _size(now, first)
        if not first:
            first.fill_(now)
        return max(EPSILON_SCALE, now if first < EPSILON_SCALE else float(first))

    def _moved(self, name: str, grad: Tensor) -> Tensor:
        """Move the momentum; returns Nesterov's form of it, of norm 1."""
        first = self._state(f"{name}/first", grad.shape, grad, torch.bfloat16)
        update = torch.empty_like(grad, dtype=_dtype_of_products(grad))
        square = torch.zeros(1, device=grad.device)
        for rows in row_chunks(grad):
            new = grad[rows].float()
            moved = first[rows].float().lerp_(new, 1.0 - BETA)
            first[rows] = moved
            update[rows] = new.lerp_(moved, BETA)
            square += new.square_().sum()
        return update.div_(self._sum(name, square).sqrt_().clamp_(min=LEAST_NORM))

    def _orthogonalise(self, name: str, tall: Tensor) -> None:
        """Bring the singular values of a matrix with more rows than columns from at most 1 to about 1, in place."""
        for one, three, five in MUON_POLYNOMIALS:
            square = tall.t() @ tall
            if self._part(name) is not None:
                square = self._sum(name, square.float()).to(tall.dtype)
            square = torch.addmm(square, square, square, beta=three, alpha=five)
            for rows in row_chunks(tall):
                tall[rows] = torch.addmm(tall[rows], tall[rows], square, beta=one)


class MuonTogether(Together):
    """Many matrices by few kernels. Memory: four fp32 copies of them, or a little more; for good, momentum and sizes."""

    def parts_of_state(self, weights: Sequence[tuple[str, tuple[int, ...]]]) -> list[State]:
        first = [(f"{name}/first", shape) for name, shape in weights]
        return [(torch.bfloat16, first), (torch.float32, [(f"{name}/size", (1,)) for name, _ in weights])]

    def change(self, wide: Tensor, grad: Tensor, steps: Sequence[Step]) -> Tensor:
        first, sizes = self.statistics()
        rate = _size(self.sizes(wide), sizes).mul_(self.each([step.learning_rate for step in steps]))
        update = grad.to(torch.float32, copy=True)
        moved = first.float().lerp_(update, 1.0 - BETA)
        first.copy_(moved)
        update.lerp_(moved, BETA)
        del moved
        inverse = self.root_inverse / self.sizes(update).clamp_(min=LEAST_NORM)  # of the norms
        for a in self.alike:
            part, longest = a.numbers(update), max(a.shape[1:])
            x = (part * a.each(inverse)[:, None, None]).to(_dtype_of_products(grad))
            x = _orthogonal(x.mT).mT if a.shape[1] < a.shape[2] else _orthogonal(x)
            torch.mul(x, MATRIX_RATE * longest**0.5, out=part)
        self.decay_(wide, steps)
        self.subtract_(wide, update, rate)
        return rate


def _orthogonal(tall: Tensor) -> Tensor:
    """Several matrices (count, n, m), n at least m, with their singular values brought from at most 1 to about 1."""
    for one, three, five in MUON_POLYNOMIALS:
        square = tall.mT @ tall
        square = torch.baddbmm(square, square, square, beta=three, alpha=five)
        tall = torch.baddbmm(tall, tall, square, beta=one)
    return tall


def _dtype_of_products(grad: Tensor) -> torch.dtype:
    """That of the gradient, but for fp16, in which the small singular values of a matrix vanish."""
    return torch.bfloat16 if grad.dtype == torch.bfloat16 else torch.float32


def _size(now: Tensor, first: Tensor) -> Tensor:
    """What steps are scaled by, of sizes that stay on the device; those seen for the first time are put into `first`."""
    first.copy_(torch.where(first == 0.0, now, first))
    return torch.where(first < EPSILON_SCALE, now, first).clamp_(min=EPSILON_SCALE)
