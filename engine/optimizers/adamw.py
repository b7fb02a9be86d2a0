"""AdamW, plain and scaled by each weight's RMS: two fp32 numbers of state per weight.

The scaled form multiplies the learning rate by max(1e-3, RMS(weight)), as Adafactor does: with T5's initial values, whose
sizes differ a hundredfold, plain AdamW diverges at the rates at which this one learns best.
Source: Loshchilov and Hutter 2019 (arXiv 1711.05101); the scaling: nanoT5's AdamWScale.
"""

from __future__ import annotations

from torch import Tensor

from engine.optimizers.adafactor import EPSILON_SCALE
from engine.optimizers.base import Optimizer, Step, root_mean_square, row_chunks

BETA_1, BETA_2 = 0.9, 0.999
EPSILON = 1e-8


class AdamW(Optimizer):
    """State: two numbers a weight. Memory of an update: three chunks."""

    scaled = False

    @staticmethod
    def state_elements(shape: tuple[int, ...]) -> int:
        """First and second moment of every element."""
        count = 2
        for size in shape:
            count *= size
        return count

    def _update(self, name: str, weight: Tensor, grad: Tensor, step: Step) -> None:
        first = self._state(f"{name}/first", weight.shape, weight.device)
        second = self._state(f"{name}/second", weight.shape, weight.device)
        rate = step.learning_rate * (max(EPSILON_SCALE, root_mean_square(weight)) if self.scaled else 1.0)
        correction = (1.0 - BETA_2**step.number) ** 0.5
        rate *= correction / (1.0 - BETA_1**step.number)
        keep = 1.0 - step.learning_rate * step.weight_decay
        for rows in row_chunks(weight):
            g = grad[rows].float()
            m = first[rows].lerp_(g, 1.0 - BETA_1)
            v = second[rows].mul_(BETA_2).addcmul_(g, g, value=1.0 - BETA_2)
            values = weight[rows].float().mul_(keep)
            self._write(name, rows, weight, values.addcdiv_(m, v.sqrt().add_(EPSILON * correction), value=-rate), step)


class AdamWRMS(AdamW):
    """AdamW whose steps are scaled by each weight's RMS."""

    scaled = True
