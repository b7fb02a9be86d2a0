"""Muon: the momentum of a matrix with all its singular values brought to about 1, so that it learns in all directions
alike.

A sum of gradients is dominated by a few directions, those of what is common; what is rare moves by little. Three
polynomials in X Xᵀ bring the singular values together without finding them. They are made of products, in the dtype of
the gradient, and differ, each being the best for where the one before has left the values: so they do in three turns
what takes one and the same polynomial five (docs/recipes.md). Here the step is scaled by the weight's RMS, but by that
of the first step: scaled by what it has become, a matrix all directions of which move grows faster the larger it is (to
80 times its size in 3,000 steps, where the loss rose).
Matrices take 0.4 of the learning rate, at which the rest (embedding, head, bias tables and vectors, as by Adafactor)
learns best beside them (docs/recipes.md).
Source: Jordan et al. 2024, Muon (github.com/KellerJordan/Muon), for momentum and Nesterov's form; Amsel et al. 2025,
The Polar Express (arXiv 2505.16932), for how polynomials are chosen one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.optimizers.adafactor import Adafactor
from engine.optimizers.base import EPSILON_SCALE, StateLayout, WeightGroup, row_chunks
from model.shapes import is_block_matrix
from settings.optimizers import MUON_POLYNOMIALS

BETA = 0.95
MATRIX_RATE = 0.4
LEAST_NORM = 1e-15  # A gradient of a smaller norm counts as empty.


class Muon(Adafactor):
    """State: a bf16 number for each weight of the matrices of blocks and their first size, Adafactor's for the rest.

    Memory of an update: a copy of the matrix, three squares of its shorter side, and three chunks.
    """

    def layout(self, name: str, shape: tuple[int, ...]) -> StateLayout:
        if not is_block_matrix(name, shape):
            return super().layout(name, shape)
        return {"first": (shape, torch.bfloat16), "size": ((1,), torch.float32)}

    def _update(self, group: WeightGroup) -> None:
        if not group.is_block_matrix:
            return super()._update(group)
        update = _momentum(group)
        n, m = update.shape[1:]
        _orthogonalise(update.mT if n < m else update)
        # Singular values of 1 are an RMS of 1 / root of the longer side.
        rate = _first_size(group) * (group.step.learning_rate * MATRIX_RATE * max(n, m) ** 0.5)
        for rows in group.chunks:
            group.subtract(rows, update[:, rows].float(), rate)


def _momentum(group: WeightGroup) -> Tensor:
    """Move the momentum; returns Nesterov's form of it (count, n, m), each matrix of norm 1."""
    first = group.state["first"]
    # Products are in the dtype of the gradient, but for fp16, in which the small singular values of a matrix vanish.
    is_narrow = group.gradient.matrices[0].dtype == torch.bfloat16
    update = torch.empty_like(first, dtype=torch.bfloat16 if is_narrow else torch.float32)
    square = torch.zeros(len(first), 1, 1, device=first.device)
    for rows in group.chunks:
        gradient = group.gradient[rows]
        moved = first[:, rows].float().lerp_(gradient, 1.0 - BETA)
        first[:, rows] = moved
        nesterov = gradient.lerp_(moved, BETA)
        update[:, rows] = nesterov
        # By rows first: the order in which torch sums a whole matrix depends on the number of threads.
        square += nesterov.square_().sum(2, keepdim=True).sum(1, keepdim=True)
    return update.div_(square.sqrt_().clamp_(min=LEAST_NORM))


def _orthogonalise(tall: Tensor) -> None:
    """Bring the singular values of matrices with more rows than columns from at most 1 to about 1, in place."""
    tall = tall[0] if len(tall) == 1 else tall
    for one, three, five in MUON_POLYNOMIALS:
        square = tall.mT @ tall
        # Products and sums apart: what torch scales inside a product depends, on some processors, on the number of
        # threads.
        square = (square @ square).mul_(five).add_(square, alpha=three)
        for rows in row_chunks(tall if tall.dim() == 2 else tall[0]):
            part = tall[..., rows, :]
            part.copy_((part @ square).add_(part, alpha=one))


def _first_size(group: WeightGroup) -> float | Tensor:
    """The weight's RMS at its first step; of an adapter's matrix that began at zero, what it is now."""
    now = group.root_mean_square()
    first = group.state["size"].unsqueeze(2)
    first.copy_(torch.where(first == 0.0, now, first))
    if isinstance(now, float):
        return max(EPSILON_SCALE, now if first < EPSILON_SCALE else float(first))
    return torch.where(first < EPSILON_SCALE, now, first).clamp_(min=EPSILON_SCALE)
