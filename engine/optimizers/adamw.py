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

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.optimizers.base import Optimizer, Step, at_least, row_chunks
from engine.optimizers.together import EPSILON_SCALE
from limits import STATE_BLOCK

BETA_1, BETA_2 = 0.9, 0.999
EPSILON = 1e-8
LOG_RANGE = 24.0  # powers of two below a block's largest second moment that a byte can tell apart


class AdamW(Optimizer):
    """State: two fp32 numbers a weight. Memory of an update: four chunks."""

    scaled = False

    @classmethod
    def state_bytes(cls, shape: tuple[int, ...], name: str = "") -> int:
        """First and second moment of every element."""
        return 2 * 4 * math.prod(shape)

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
        """Move both moments of a chunk, and give them."""
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

    def _moments(self, name: str, rows: slice, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        if weight.dim() != 2:
            return super()._moments(name, rows, weight, grad)
        blocks = (weight.shape[0], -(-weight.shape[1] // STATE_BLOCK))
        codes = [
            self._state(f"{name}/{k}", weight.shape, weight, d)[rows]
            for k, d in (("first", torch.int8), ("second", torch.uint8))
        ]
        scales = [self._state(f"{name}/{k}_scale", blocks, weight)[rows] for k in ("first", "second")]
        first, second = decode_first(codes[0], scales[0]), decode_second(codes[1], scales[1])
        first.lerp_(grad, 1.0 - BETA_1)
        second.mul_(BETA_2).addcmul_(grad, grad, value=1.0 - BETA_2)
        encode_first(first, codes[0], scales[0])
        encode_second(second, codes[1], scales[1])
        return first, second


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
