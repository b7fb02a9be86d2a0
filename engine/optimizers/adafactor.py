"""Adafactor: adaptive steps with one number per row and one per column instead of two per weight. T5's own optimizer.

Statistics are fp32 whatever the weights are: torch's own keeps them in bf16 for bf16 weights, where they stop moving.
Each weight's update is clipped to RMS 1, which stands in for clipping the global norm and needs no other gradient, and is
scaled by the weight's own RMS. Source: Shazeer and Stern 2018 (arXiv 1804.04235), algorithms 4 and 5, without momentum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from devices.kernels.calls import kernels_for
from engine.optimizers.base import Group, Optimizer, StateLayout, at_least

EPSILON_GRADIENT = 1e-30  # added to squared gradients
CLIP = 1.0  # most RMS of an update before scaling
DECAY_EXPONENT = 0.8  # second moments decay by 1 - step^-0.8


class Adafactor(Optimizer):
    """State: rows + columns numbers for a matrix, as many as the weight for a vector. Memory of an update: three chunks."""

    def layout(self, name: str, shape: tuple[int, ...]) -> StateLayout:
        if len(shape) == 1:
            return {"square": (shape, torch.float32)}
        return {"rows": (shape[:1], torch.float32), "columns": (shape[1:], torch.float32)}

    def _update(self, group: Group) -> None:
        weight, grad = group.weight, group.grad
        rate, decay = group.scaled_rate(), 1.0 - group.step.number**-DECAY_EXPONENT
        if "square" in group.state:
            square = group.state["square"].unsqueeze(1)
            square.mul_(decay).add_(group.gradient().square().add_(EPSILON_GRADIENT), alpha=1.0 - decay)
            row_factor, column_factor, compiled = square.rsqrt(), torch.ones(1, device=grad.device), None
        else:
            row_factor, column_factor = _factors(group, decay)
            compiled = kernels_for(weight, grad)

        def unclipped(rows: slice) -> Tensor:
            return (group.gradient(rows) * row_factor[:, rows]).mul_(column_factor)

        chunks, whole = list(group.chunks()), list[Tensor]()
        if compiled is None:
            whole = [unclipped(chunks[0])] if len(chunks) == 1 else []  # used again below
            norm = group.norm(whole or (unclipped(rows) for rows in chunks))
        else:
            norm = compiled.adafactor_norm(grad[0], row_factor, column_factor.square()) ** 0.5
        rate /= at_least(1.0, norm / (weight[0].numel() ** 0.5 * CLIP))
        if compiled is not None:
            keep = 1.0 - group.step.learning_rate * group.step.weight_decay
            assert isinstance(rate, float), "kernels compute on the CPU"
            compiled.adafactor_apply(weight[0], grad[0], row_factor, column_factor, keep, rate, int(group.keys[0]))
            return
        for rows in chunks:
            group.subtract(rows, whole.pop() if whole else unclipped(rows), rate)


def _factors(group: Group, decay: float) -> tuple[Tensor, Tensor]:
    """Move the means of squared gradients over rows and columns; returns the inverse roots (count, n, 1), (count, 1, m)."""
    grad, n = group.grad, group.grad.shape[1]
    rows, columns = group.state["rows"], group.state["columns"]
    torch._foreach_mul_([rows, columns], decay)
    total: Tensor | None = None
    if compiled := kernels_for(grad):
        means, sums = compiled.adafactor_sums(grad[0])
        rows.add_(means.add_(EPSILON_GRADIENT), alpha=1.0 - decay)
        total = sums.unsqueeze(0)
    else:
        for chunk in group.chunks():
            square = group.gradient(chunk).square()
            rows[:, chunk].add_(square.mean(2).add_(EPSILON_GRADIENT), alpha=1.0 - decay)
            total = square.sum(1) if total is None else total.add_(square.sum(1))
    assert total is not None
    columns.add_(total.div_(n).add_(EPSILON_GRADIENT), alpha=1.0 - decay)
    row_factors, column_factors = torch._foreach_rsqrt([rows / (rows.sum(1, keepdim=True) / n), columns])
    return row_factors.unsqueeze(2), column_factors.unsqueeze(1)
