"""AdamW: plain, scaled by each weight's RMS, and with its moments in 8 bits.

The scaled form multiplies the learning rate by max(1e-3, RMS(weight)), as Adafactor does: with T5's initial values,
whose sizes differ a hundredfold, plain AdamW diverges at the rates at which this one learns best.
The 8-bit form holds each moment in one byte, in blocks of 128 elements of a row with a scale each. The first moment is
companded by a square root, which keeps small values apart; the second by a logarithm, which keeps its relative error at
3% over seven decades and never turns a small value into zero, where the step would explode.
Source: Loshchilov and Hutter 2019 (arXiv 1711.05101); the scaling: nanoT5's AdamWScale; block-wise 8-bit states:
Dettmers et al. 2022 (arXiv 2110.02861).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.optimizers.base import Optimizer, StateLayout, WeightGroup
from settings.optimizers import STATE_BLOCK

BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-8
CODES = {"first": torch.int8, "second": torch.uint8}  # Dtypes of the moments in the 8-bit form.
LOG_RANGE = 24.0  # A byte can tell apart so many powers of two below a block's largest second moment.


class AdamW(Optimizer):
    """State: two fp32 numbers a weight. Memory of an update: four chunks."""

    scaled = False

    def layout(self, name: str, shape: tuple[int, ...]) -> StateLayout:
        return {kind: (shape, torch.float32) for kind in CODES}

    def _update(self, group: WeightGroup) -> None:
        number = group.step.number
        correction = (1.0 - BETA_2**number) ** 0.5
        rate = group.scaled_rate() if self.scaled else group.step.learning_rate
        rate *= correction / (1.0 - BETA_1**number)
        for rows in group.chunks:
            self._update_rows(group, rows, rate, EPSILON * correction)

    def _update_rows(self, group: WeightGroup, rows: slice, rate: float | Tensor, epsilon: float) -> None:
        gradient = group.gradient[rows]
        first, second = self._moments(group, rows, gradient)
        # Nothing reads the gradient any more, so that the roots take its place.
        root = torch.sqrt(second, out=gradient).add_(epsilon)
        del second
        values = group.decayed(rows)
        if isinstance(rate, Tensor):
            values.addcmul_(root.reciprocal_().mul_(first), rate, value=-1.0)
        else:
            values.addcdiv_(first, root, value=-rate)
        group.write(rows, values)

    def _moments(self, group: WeightGroup, rows: slice, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of both moments, moved by those of the gradient: (count, rows, m) fp32."""
        first, second = (group.state[kind].view(group.shape)[:, rows] for kind in CODES)
        return _moved(first, second, gradient)


class AdamWRMS(AdamW):
    """AdamW whose steps are scaled by each weight's RMS."""

    scaled = True


class AdamW8bit(AdamWRMS):
    """The scaled AdamW with moments of one byte each. State: 2.06 bytes a weight; vectors keep fp32."""

    def layout(self, name: str, shape: tuple[int, ...]) -> StateLayout:
        if len(shape) == 1:
            return super().layout(name, shape)
        blocks = (shape[0], -(-shape[1] // STATE_BLOCK))
        return {kind: (shape, dtype) for kind, dtype in CODES.items()} | {
            f"{kind}_scale": (blocks, torch.float32) for kind in CODES
        }

    def _moments(self, group: WeightGroup, rows: slice, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if "first_scale" not in group.state:
            return super()._moments(group, rows, gradient)
        codes = [group.state[kind][:, rows] for kind in CODES]
        scales = [group.state[f"{kind}_scale"][:, rows] for kind in CODES]
        first = decode_first(codes[0], scales[0])
        second = decode_second(codes[1], scales[1])
        _moved(first, second, gradient)
        encode_first(first, codes[0], scales[0])
        encode_second(second, codes[1], scales[1])
        return first, second


def _moved(first: Tensor, second: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return first.lerp_(gradient, 1.0 - BETA_1), second.mul_(BETA_2).addcmul_(gradient, gradient, value=1.0 - BETA_2)


def in_blocks(x: Tensor) -> Tensor:
    """(..., m) -> (..., m / STATE_BLOCK, STATE_BLOCK), padded with zeros: a view where m is a multiple of
    STATE_BLOCK.
    """
    missing = -x.shape[-1] % STATE_BLOCK
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, STATE_BLOCK))


def encode_first(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write x (..., m) as sign and square root of its share of the block's largest value."""
    blocks = in_blocks(x)
    largest = blocks.abs().amax(-1)
    share = (blocks / largest.clamp(min=1e-38).unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
    codes.copy_(share.sign().mul_(share.abs().sqrt_().mul_(127).round_()))
    scales.copy_(largest)


def decode_first(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `encode_first`; fp32."""
    root = codes.float().div_(127)
    return (in_blocks(root * root.abs()) * scales.unsqueeze(-1)).flatten(-2)[..., : codes.shape[-1]].contiguous()


def encode_second(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write x (..., m), not negative, as 255 levels of log2 below the block's largest value; code 0 is zero alone."""
    blocks = in_blocks(x)
    largest = blocks.amax(-1)
    share = (blocks / largest.clamp(min=1e-38).unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
    level = share.clamp(min=2.0**-LOG_RANGE).log2_().mul_(254 / LOG_RANGE).add_(255).round_()
    codes.copy_(level.masked_fill_(share == 0, 0))
    scales.copy_(largest)


def decode_second(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `encode_second`; fp32."""
    share = codes.float().sub_(255).mul_(LOG_RANGE / 254).exp2_().masked_fill_(codes == 0, 0)
    return (in_blocks(share) * scales.unsqueeze(-1)).flatten(-2)[..., : codes.shape[-1]].contiguous()
