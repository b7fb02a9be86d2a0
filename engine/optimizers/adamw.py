"""AdamW: plain, scaled by each weight's RMS, and with its moments in 8 bits.

The scaled form multiplies the learning rate by max(1e-3, RMS(weight)), as Adafactor does: with T5's initial values, whose
sizes differ a hundredfold, plain AdamW diverges at the rates at which this one learns best.
The 8-bit form holds each moment in one byte, in blocks of 128 elements of a row with a scale each. The first moment is
companded by a square root, which keeps small values apart; the second by a logarithm, which keeps its relative error at
3% over seven decades and never turns a small value into zero, where the step would explode.
Source: Loshchilov and Hutter 2019 (arXiv 1711.05101); the scaling: nanoT5's AdamWScale; block-wise 8-bit states: Dettmers
et al. 2022 (arXiv 2110.02861).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.optimizers.base import Step, at_least, row_chunks
from engine.optimizers.together import EPSILON_SCALE, Grouped, State, Together
from limits import STATE_BLOCK

BETA_1, BETA_2 = 0.9, 0.999
EPSILON = 1e-8
CODES = {"first": torch.int8, "second": torch.uint8}  # of the 8-bit form
LOG_RANGE = 24.0  # powers of two below a block's largest second moment that a byte can tell apart


class AdamW(Grouped):
    """State: two fp32 numbers a weight. Memory of an update: four chunks."""

    scaled = False

    @classmethod
    def state_bytes(cls, shape: tuple[int, ...], name: str = "") -> int:
        """First and second moment of every element."""
        return 2 * 4 * math.prod(shape)

    def rule(self, name: str, shape: tuple[int, ...]) -> type[Together] | None:
        return AdamWRMSTogether if self.scaled else AdamWTogether

    def _update(self, name: str, weight: Tensor, grad: Tensor, step: Step) -> None:
        scale = at_least(EPSILON_SCALE, self._root_mean_square(name, weight)) if self.scaled else 1.0
        correction = (1.0 - BETA_2**step.number) ** 0.5
        rate = step.learning_rate * scale
        rate *= correction / (1.0 - BETA_1**step.number)
        keep = 1.0 - step.learning_rate * step.weight_decay
        for rows in row_chunks(weight):
            first, second = self._moments(name, rows, weight, grad[rows].float())
            values = self._read(name, rows, weight).mul_(keep)
            root = second.sqrt().add_(EPSILON * correction)
            if isinstance(rate, Tensor):
                values.addcdiv_(first * rate, root, value=-1.0)
            else:
                values.addcdiv_(first, root, value=-rate)
            self._write(name, rows, weight, values, step)

    def _moments(self, name: str, rows: slice, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        first = self._state(f"{name}/first", weight.shape, weight)[rows]
        second = self._state(f"{name}/second", weight.shape, weight)[rows]
        return first.lerp_(grad, 1.0 - BETA_1), second.mul_(BETA_2).addcmul_(grad, grad, value=1.0 - BETA_2)


class AdamWRMS(AdamW):
    """AdamW whose steps are scaled by each weight's RMS."""

    scaled = True


class AdamW8bit(AdamWRMS):
    """The scaled AdamW with moments of one byte each. State: 2.06 bytes a weight; vectors keep fp32."""

    @classmethod
    def state_bytes(cls, shape: tuple[int, ...], name: str = "") -> int:
        """Two bytes an element and two fp32 scales a block, for a matrix."""
        if len(shape) != 2:
            return super().state_bytes(shape, name)
        return 2 * shape[0] * shape[1] + 2 * 4 * shape[0] * -(-shape[1] // STATE_BLOCK)

    def rule(self, name: str, shape: tuple[int, ...]) -> type[Together] | None:
        if len(shape) != 2:
            return super().rule(name, shape)
        return None if shape[1] % STATE_BLOCK else AdamW8bitTogether

    def _moments(self, name: str, rows: slice, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        if weight.dim() != 2:
            return super()._moments(name, rows, weight, grad)
        blocks = (weight.shape[0], -(-weight.shape[1] // STATE_BLOCK))
        codes = [self._state(f"{name}/{k}", weight.shape, weight, d)[rows] for k, d in CODES.items()]
        scales = [self._state(f"{name}/{k}_scale", blocks, weight)[rows] for k in CODES]
        first, second = decode_first(codes[0], scales[0]), decode_second(codes[1], scales[1])
        first.lerp_(grad, 1.0 - BETA_1)
        second.mul_(BETA_2).addcmul_(grad, grad, value=1.0 - BETA_2)
        encode_first(first, codes[0], scales[0])
        encode_second(second, codes[1], scales[1])
        return first, second


class AdamWTogether(Together):
    """Many weights by few kernels. Memory: three fp32 copies of the weights; for good, both moments."""

    scaled = False

    def parts_of_state(self, weights: Sequence[tuple[str, tuple[int, ...]]]) -> list[State]:
        return [(torch.float32, [(f"{name}/{kind}", shape) for name, shape in weights]) for kind in ("first", "second")]

    def change(self, wide: Tensor, grad: Tensor, steps: Sequence[Step]) -> Tensor:
        number = steps[0].number
        correction = (1.0 - BETA_2**number) ** 0.5
        rate = self.scales(wide, steps) if self.scaled else self._rates(steps)
        rate = rate.mul_(correction / (1.0 - BETA_1**number))
        first, second = self.move(grad.float())
        update = second.sqrt().add_(EPSILON * correction)
        torch.div(first, update, out=update)
        del first, second
        self.decay_(wide, steps)
        self.subtract_(wide, update, rate)
        return rate

    def _rates(self, steps: Sequence[Step]) -> Tensor:
        return torch.ones_like(self.root_inverse).mul_(self.each([step.learning_rate for step in steps]))

    def move(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Move both moments, and give them."""
        first, second = self.statistics()
        return first.lerp_(grad, 1.0 - BETA_1), second.mul_(BETA_2).addcmul_(grad, grad, value=1.0 - BETA_2)


class AdamWRMSTogether(AdamWTogether):
    """The same, scaled by each weight's RMS."""

    scaled = True


class AdamW8bitTogether(AdamWRMSTogether):
    """The same with moments of one byte each, of matrices whose rows are whole blocks."""

    def parts_of_state(self, weights: Sequence[tuple[str, tuple[int, ...]]]) -> list[State]:
        codes: list[State] = [(d, [(f"{name}/{k}", shape) for name, shape in weights]) for k, d in CODES.items()]
        scales: list[State] = [
            (torch.float32, [(f"{name}/{k}_scale", (n, m // STATE_BLOCK)) for name, (n, m) in weights]) for k in CODES
        ]
        return [*codes, *scales]

    def move(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks follow each other over all rows of all weights, as one row of them would."""
        first_codes, second_codes, first_scales, second_scales = (part.view(1, -1) for part in self.statistics())
        first, second = decode_first(first_codes, first_scales), decode_second(second_codes, second_scales)
        first.view(-1).lerp_(grad, 1.0 - BETA_1)
        second.view(-1).mul_(BETA_2).addcmul_(grad, grad, value=1.0 - BETA_2)
        encode_first(first, first_codes, first_scales)
        encode_second(second, second_codes, second_scales)
        return first.view(-1), second.view(-1)


def in_blocks(x: Tensor) -> Tensor:
    """(n, m) -> (n, m / STATE_BLOCK, STATE_BLOCK), padded with zeros: a view where m is a multiple of STATE_BLOCK."""
    missing = -x.shape[1] % STATE_BLOCK
    return (F.pad(x, (0, missing)) if missing else x).unflatten(1, (-1, STATE_BLOCK))


def encode_first(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write x (n, m) as sign and square root of its share of the block's largest value."""
    blocks = in_blocks(x)
    largest = blocks.abs().amax(2)
    share = (blocks / largest.clamp(min=1e-38).unsqueeze(2)).flatten(1)[:, : x.shape[1]]
    codes.copy_(share.sign().mul_(share.abs().sqrt_().mul_(127).round_()))
    scales.copy_(largest)


def decode_first(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `encode_first`: (n, m) fp32."""
    root = codes.float().div_(127)
    return (in_blocks(root * root.abs()) * scales.unsqueeze(2)).flatten(1)[:, : codes.shape[1]].contiguous()


def encode_second(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write x (n, m), not negative, as 255 levels of log2 below the block's largest value; code 0 is zero alone."""
    blocks = in_blocks(x)
    largest = blocks.amax(2)
    share = (blocks / largest.clamp(min=1e-38).unsqueeze(2)).flatten(1)[:, : x.shape[1]]
    level = share.clamp(min=2.0**-LOG_RANGE).log2_().mul_(254 / LOG_RANGE).add_(255).round_()
    codes.copy_(level.masked_fill_(share == 0, 0))
    scales.copy_(largest)


def decode_second(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `encode_second`: (n, m) fp32."""
    share = codes.float().sub_(255).mul_(LOG_RANGE / 254).exp2_().masked_fill_(codes == 0, 0)
    return (in_blocks(share) * scales.unsqueeze(2)).flatten(1)[:, : codes.shape[1]].contiguous()
