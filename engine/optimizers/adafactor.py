"""Adafactor: adaptive steps with one number per row and one per column instead of two per weight. T5's own optimizer.

Statistics are fp32 whatever the weights are: torch's own keeps them in bf16 for bf16 weights, where they stop moving.
Each weight's update is clipped to RMS 1, which stands in for clipping the global norm and needs no other gradient, and is
scaled by the weight's own RMS. Source: Shazeer and Stern 2018 (arXiv 1804.04235), algorithms 4 and 5, without momentum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from devices.base import is_host
from devices.kernels.calls import kernels, takes
from engine.optimizers.base import Step, at_least, row_chunks, subtract_
from engine.optimizers.rounding import Rounding, Stochastic
from engine.optimizers.together import EPSILON_SCALE, Grouped, State, Together
from engine.sharing.sharding import Shards

EPSILON_GRADIENT = 1e-30  # added to squared gradients
CLIP = 1.0  # most RMS of an update before scaling
DECAY_EXPONENT = 0.8  # second moments decay by 1 - step^-0.8


class Adafactor(Grouped):
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

    def rule(self, name: str, shape: tuple[int, ...]) -> type[Together] | None:
        return AdafactorTogether

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
        if isinstance(rate, Tensor) and self.rates is not None:
            self.rates.append(rate.reshape(1))
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


class AdafactorTogether(Together):
    """Many weights by few kernels. Memory: two fp32 copies of the weights; for good, 8 bytes a row and column."""

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor], state: dict[str, Tensor]) -> None:
        super().__init__(names, weights, state)
        self.inverse = self.inverse_counts()

    def parts_of_state(self, weights: Sequence[tuple[str, tuple[int, ...]]]) -> list[State]:
        if self.dim == 1:
            return [(torch.float32, [(f"{name}/square", shape) for name, shape in weights])]
        sides = [
            (f"{name}/{kind}", shape[k : k + 1])
            for k, kind in enumerate(("rows", "columns"))
            for name, shape in weights
        ]
        return [(torch.float32, sides)]

    def change(self, wide: Tensor, grad: Tensor, steps: Sequence[Step]) -> Tensor:
        rate = self.scales(wide, steps)
        update, factor = self._unclipped(grad, steps[0].number)
        clip = self.sizes(update).mul_(factor).clamp_(min=CLIP).div_(CLIP)
        rate = rate.mul_(factor).div_(clip)
        self.decay_(wide, steps)
        self.subtract_(wide, update, rate)
        return rate

    def _unclipped(self, grad: Tensor, number: int) -> tuple[Tensor, Tensor | float]:
        """The update but for a factor, and the factor of each weight; moves the statistics."""
        decay, state = 1.0 - number**-DECAY_EXPONENT, self.statistics()[0]
        if self.dim == 1:
            state.lerp_(grad.float().square().add_(EPSILON_GRADIENT), 1.0 - decay)
            return state.rsqrt().mul_(grad), 1.0
        square = torch.empty_like(state)
        for a in self.alike:
            both = a.numbers(grad)
            torch.linalg.vector_norm(both, dim=2, dtype=torch.float32, out=a.of_rows(square))
            torch.linalg.vector_norm(both, dim=1, dtype=torch.float32, out=a.of_columns(square))
        state.lerp_(square.square_().mul_(self.inverse).add_(EPSILON_GRADIENT), 1.0 - decay)
        factors, update = state.rsqrt(), torch.empty(grad.numel(), device=self.device)
        for a in self.alike:
            part = torch.mul(a.numbers(grad), a.of_rows(factors).unsqueeze(2), out=a.numbers(update))
            part.mul_(a.of_columns(factors).unsqueeze(1))
        means = [a.of_rows(state).mean(1) for a in self.alike]
        return update, (means[0] if len(means) == 1 else torch.cat(means)).sqrt_()


def seen(number: Tensor) -> float | Tensor:
    """A scalar as a number where looking at it costs nothing; else as it is, where it is."""
    return float(number) if is_host(number) else number.reshape(())
