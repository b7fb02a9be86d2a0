"""Adafactor: adaptive steps with one number per row and one per column instead of two per weight. T5's own optimizer.

Statistics are fp32 whatever the weights are: torch's own keeps them in bf16 for bf16 weights, where they stop moving.
Each weight's update is clipped to RMS 1, which stands in for clipping the global norm and needs no other gradient, and is
scaled by the weight's own RMS. Source: Shazeer and Stern 2018 (arXiv 1804.04235), algorithms 4 and 5, without momentum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from devices.kernels.calls import kernels, takes
from engine.optimizers.base import Optimizer, Step, row_chunks
from engine.optimizers.rounding import Stochastic

EPSILON_GRADIENT = 1e-30  # added to squared gradients
EPSILON_SCALE = 1e-3  # least RMS of a weight, so that weights near zero move
CLIP = 1.0  # most RMS of an update before scaling
DECAY_EXPONENT = 0.8  # second moments decay by 1 - step^-0.8


class Adafactor(Optimizer):
    """State: rows + columns numbers for a matrix, as many as the weight for a vector. Memory of an update: three chunks."""

    @classmethod
    def state_bytes(cls, shape: tuple[int, ...], name: str = "") -> int:
        """Rows + columns of a matrix, all of a vector, in fp32."""
        return 4 * (shape[0] + shape[1] if len(shape) == 2 else shape[0])

    def _update(self, name: str, weight: Tensor, grad: Tensor, step: Step) -> None:
        rate = step.learning_rate * max(EPSILON_SCALE, self._root_mean_square(name, weight))
        decay = 1.0 - step.number**-DECAY_EXPONENT
        if weight.dim() == 2:
            row_factor, column_factor = self._factors(name, grad, decay)
            norm = self._update_norm(name, grad, row_factor, column_factor)
        else:
            square = self._state(f"{name}/square", weight.shape, weight)
            square.mul_(decay).add_(grad.float().square().add_(EPSILON_GRADIENT), alpha=1.0 - decay)
            row_factor, column_factor = square.rsqrt(), None
            norm = float(torch.linalg.vector_norm(grad.float() * row_factor))
        count = self._whole_rows(name, weight) * weight[0].numel()
        rate /= max(1.0, norm / count**0.5 / CLIP)
        keep = 1.0 - step.learning_rate * step.weight_decay
        is_rounded = weight.dtype == torch.bfloat16
        compiled = kernels() if not is_rounded or isinstance(self.rounding, Stochastic) else None
        if compiled is not None and column_factor is not None and takes(weight, grad):
            key = int(self._rounding_key(name, weight, step)) if is_rounded else 0
            offset = self._offset(name, 0, weight)
            compiled.adafactor_apply(weight, grad, row_factor, column_factor, keep, rate, key, offset)
            return
        for rows in row_chunks(weight):
            update = grad[rows].float() * row_factor[rows]
            if column_factor is not None:
                update.mul_(column_factor)
            values = self._read(name, rows, weight).mul_(keep).sub_(update, alpha=rate)
            self._write(name, rows, weight, values, step)

    def _factors(self, name: str, grad: Tensor, decay: float) -> tuple[Tensor, Tensor]:
        """Move the means of squared gradients over rows and columns; return the inverse roots (n, 1) and (m)."""
        rows, columns = (
            self._state(f"{name}/{k}", (n,), grad) for k, n in zip(("rows", "columns"), grad.shape, strict=True)
        )
        n, total = self._whole_rows(name, grad), torch.zeros_like(columns)
        rows.mul_(decay)
        columns.mul_(decay)
        if (compiled := kernels()) is not None and takes(grad):
            means, total = compiled.adafactor_sums(grad)
            rows.add_(means.add_(EPSILON_GRADIENT), alpha=1.0 - decay)
        else:
            for chunk in row_chunks(grad):
                square = grad[chunk].float().square()
                rows[chunk].add_(square.mean(1).add_(EPSILON_GRADIENT), alpha=1.0 - decay)
                total.add_(square.sum(0))
        sums = self._sum(name, torch.cat([total, rows.sum().view(1)]))  # one collective where the weight is sharded
        columns.add_(sums[:-1].div_(n).add_(EPSILON_GRADIENT), alpha=1.0 - decay)
        return (rows / (sums[-1] / n)).rsqrt_().unsqueeze(1), columns.rsqrt()

    def _update_norm(self, name: str, grad: Tensor, row_factor: Tensor, column_factor: Tensor) -> float:
        """Norm of the unclipped update: sum_ij g_ij^2 r_i^2 c_j^2 as one matrix-vector product."""
        weights, total = column_factor.square(), torch.zeros(1, device=grad.device, dtype=column_factor.dtype)
        if (compiled := kernels()) is not None and takes(grad):
            total += compiled.adafactor_norm(grad, row_factor, weights)
            return float(self._sum(name, total)) ** 0.5
        for chunk in row_chunks(grad):
            total += torch.mv(grad[chunk].float().square(), weights) @ row_factor[chunk].squeeze(1).square()
        return float(self._sum(name, total)) ** 0.5
