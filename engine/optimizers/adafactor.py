"""Adafactor: adaptive steps with one number per row and one per column instead of two per weight. T5's own optimizer.

Statistics are fp32 whatever the weights are: torch's own keeps them in bf16 for bf16 weights, where they stop moving.
Each weight's update is clipped to RMS 1, which stands in for clipping the global norm and needs no other gradient, and
is scaled by the weight's own RMS. Source: Shazeer and Stern 2018 (arXiv 1804.04235), algorithms 4 and 5, without
momentum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from devices.kernels.calls import Kernels, kernels_for
from engine.optimizers.base import ALL_ROWS, Optimizer, StateLayout, WeightGroup, at_least

EPSILON_GRADIENT = 1e-30  # It is added to squared gradients.
CLIP = 1.0  # The RMS of an update before scaling is at most this.
DECAY_EXPONENT = 0.8  # Second moments decay by 1 - step^-0.8.


class Adafactor(Optimizer):
    """State: rows + columns numbers for a matrix, as many as the weight for a vector. Memory of an update: three
    chunks.
    """

    def layout(self, name: str, shape: tuple[int, ...]) -> StateLayout:
        if len(shape) == 1:
            return {"square": (shape, torch.float32)}
        return {"rows": (shape[:1], torch.float32), "columns": (shape[1:], torch.float32)}

    def _update(self, group: WeightGroup) -> None:
        decay = 1.0 - group.step.number**-DECAY_EXPONENT
        if "square" in group.state:
            _update_vectors(group, decay)
        elif compiled := kernels_for(group.weight.matrices[0], group.gradient.matrices[0]):
            _update_by_kernels(compiled, group, decay)
        else:
            _update_matrices(group, decay)


def _update_vectors(group: WeightGroup, decay: float) -> None:
    gradient = group.gradient[ALL_ROWS]
    square = group.state["square"].unsqueeze(1)
    square.mul_(decay).add_(gradient.square().add_(EPSILON_GRADIENT), alpha=1.0 - decay)
    update = gradient.mul_(square.rsqrt())
    rate = _clipped(group.scaled_rate(), group.norm([update]), group)
    group.subtract(group.chunks[0], update, rate)


def _update_matrices(group: WeightGroup, decay: float) -> None:
    _, n, m = group.shape
    rows = group.state["rows"]
    columns = group.state["columns"]
    torch._foreach_mul_([rows, columns], decay)
    for chunk in group.chunks:
        row_norms = torch.linalg.vector_norm(group.gradient[chunk], dim=2)
        column_norms = torch.linalg.vector_norm(group.gradient[chunk], dim=1)
        rows[:, chunk].addcmul_(row_norms, row_norms, value=(1.0 - decay) / m)
        columns.addcmul_(column_norms, column_norms, value=(1.0 - decay) / n)
    torch._foreach_add_([rows, columns], (1.0 - decay) * EPSILON_GRADIENT)
    row_factors, column_factors = _inverse_roots(rows, columns)
    group.gradient.scale(row_factors.unsqueeze(2), column_factors.unsqueeze(1))  # It is the update now.
    norm = group.norm(group.gradient[chunk] for chunk in group.chunks)
    rate = _clipped(group.scaled_rate(), norm, group)
    for chunk in group.chunks:
        group.subtract(chunk, group.gradient[chunk], rate)


def _update_by_kernels(compiled: Kernels, group: WeightGroup, decay: float) -> None:
    """The same for one matrix, in four passes over it."""
    weight = group.weight.matrices[0]
    gradient = group.gradient.matrices[0]
    rows = group.state["rows"]
    columns = group.state["columns"]
    torch._foreach_mul_([rows, columns], decay)
    row_means, column_sums = compiled.adafactor_sums(gradient)
    rows.add_(row_means.add_(EPSILON_GRADIENT), alpha=1.0 - decay)
    columns.add_(column_sums.div_(len(weight)).add_(EPSILON_GRADIENT), alpha=1.0 - decay)
    row_factors, column_factors = _inverse_roots(rows, columns)
    norm = compiled.adafactor_norm(gradient, row_factors, column_factors.square()) ** 0.5
    rate = _clipped(group.scaled_rate(), norm, group)
    keep = 1.0 - group.step.learning_rate * group.step.weight_decay
    assert isinstance(rate, float), "kernels compute on the CPU"
    compiled.adafactor_apply(weight, gradient, row_factors, column_factors, keep, rate, int(group.keys[0]))


def _inverse_roots(rows: Tensor, columns: Tensor) -> Sequence[Tensor]:
    """What gradients are multiplied by: for each row (count, n) and each column (count, m)."""
    return torch._foreach_rsqrt([rows / rows.mean(1, keepdim=True), columns])


def _clipped(rate: float | Tensor, norm: float | Tensor, group: WeightGroup) -> float | Tensor:
    """The rate of updates of this norm, made smaller where their RMS is above `CLIP`."""
    _, n, m = group.shape
    return rate / at_least(1.0, norm / ((n * m) ** 0.5 * CLIP))
