"""Adafactor: adaptive steps with one number per row and one per column instead of two per weight. T5's own optimizer.

Statistics are fp32 whatever the weights are: torch's own keeps them in bf16 for bf16 weights, where they stop moving.
Each weight's update is clipped to RMS 1, which stands in for clipping the global norm and needs no other gradient, and is
scaled by the weight's own RMS. Source: Shazeer and Stern 2018 (arXiv 1804.04235), algorithms 4 and 5, without momentum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from devices.kernels.calls import kernels, takes
from devices.ways import is_host
from engine.optimizers.base import Optimizer, Step, at_least, row_chunks, subtract_
from engine.optimizers.rounding import Rounding, Stochastic
from engine.optimizers.together import CLIP, DECAY_EXPONENT, EPSILON_GRADIENT, EPSILON_SCALE, Together, pieces
from engine.sharing.sharding import Shards


class Adafactor(Optimizer):
    """State: rows + columns numbers for a matrix, as many as the weight for a vector. Memory of an update: three chunks."""

    @classmethod
    def state_bytes(cls, shape: tuple[int, ...], name: str = "") -> int:
        """Rows + columns of a matrix, all of a vector, in fp32."""
        return 4 * (shape[0] + shape[1] if len(shape) == 2 else shape[0])

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        rounding: Rounding | None = None,
        factors: Mapping[str, float] | None = None,
        shards: Shards | None = None,
    ) -> None:
        super().__init__(weights, rounding, factors, shards)
        if type(self) is Adafactor and weights and not any(is_host(weight) for weight in weights.values()):
            self.rates = []
        self._together: dict[tuple[str, ...], Together] = {}  # groups of weights, on a GPU

    def together(self, weights: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """On a GPU the small weights of a group, so that a few kernels serve all of them."""
        if self.shards is not None or type(self) is not Adafactor or all(is_host(weight) for weight in weights):
            return super().together(weights)
        return pieces(weights, self.rounding)

    @torch.no_grad()
    def update_all(self, weights: Sequence[nn.Parameter], step: Step) -> None:
        """One by one, or by few kernels for all."""
        if len(weights) == 1:
            return super().update_all(weights, step)
        names = tuple(self.names[id(weight)] for weight in weights)
        if names not in self._together:
            self._together[names] = Together(names, weights, self.state)
        group = self._together[names]
        steps = [self._step_of(name, weight, step) for name, weight in zip(names, weights, strict=True)]
        keys = [self._rounding_key(name, step) for name in names]
        self._tell(group.update(weights, steps, keys))

    def _tell(self, rate: Tensor) -> None:
        if self.rates is not None:
            self.rates.append(rate)

    def _update(self, name: str, weight: Tensor, grad: Tensor, step: Step) -> None:
        rate = step.learning_rate * at_least(EPSILON_SCALE, self._root_mean_square(name, weight))
        decay = 1.0 - step.number**-DECAY_EXPONENT
        if weight.dim() == 2:
            row_factor, column_factor = self._factors(name, grad, decay)
            norm = self._update_norm(name, grad, row_factor, column_factor)
        else:
            square = self._state(f"{name}/square", weight.shape, weight)
            square.mul_(decay).add_(grad.float().square().add_(EPSILON_GRADIENT), alpha=1.0 - decay)
            row_factor, column_factor = square.rsqrt(), None
            norm = seen(torch.linalg.vector_norm(grad.float() * row_factor))
        count = self._whole_rows(name, weight) * weight[0].numel()
        rate /= at_least(1.0, norm / count**0.5 / CLIP)
        if isinstance(rate, Tensor):
            self._tell(rate.reshape(1))
        keep = 1.0 - step.learning_rate * step.weight_decay
        is_rounded = weight.dtype == torch.bfloat16
        compiled = kernels() if not is_rounded or isinstance(self.rounding, Stochastic) else None
        if compiled is not None and column_factor is not None and takes(weight, grad):
            key = self._rounding_key(name, step) if is_rounded else 0
            offset = self._offset(name, 0, weight)
            assert isinstance(rate, float), "kernels compute on the CPU"
            compiled.adafactor_apply(weight, grad, row_factor, column_factor, keep, rate, key, offset)
            return
        for rows in row_chunks(weight):
            update = grad[rows].float() * row_factor[rows]
            if column_factor is not None:
                update.mul_(column_factor)
            values = subtract_(self._read(name, rows, weight).mul_(keep), update, rate)
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

    def _update_norm(self, name: str, grad: Tensor, row_factor: Tensor, column_factor: Tensor) -> float | Tensor:
        """Norm of the unclipped update: sum_ij g_ij^2 r_i^2 c_j^2 as one matrix-vector product."""
        weights, total = column_factor.square(), torch.zeros(1, device=grad.device, dtype=column_factor.dtype)
        if (compiled := kernels()) is not None and takes(grad):
            total += compiled.adafactor_norm(grad, row_factor, weights)
            return float(self._sum(name, total)) ** 0.5
        for chunk in row_chunks(grad):
            total += torch.mv(grad[chunk].float().square(), weights) @ row_factor[chunk].squeeze(1).square()
        return seen(self._sum(name, total)) ** 0.5


def seen(number: Tensor) -> float | Tensor:
    """A scalar as a number where looking at it costs nothing; else as it is, where it is."""
    return float(number) if is_host(number) else number.reshape(())
