"""How bf16 weights take steps smaller than their last bit.

`Stochastic` rounds up or down by chance, right on average: a random 16-bit number is added below bf16's last bit before
the rest is cut off. The numbers are a hash of (seed, step, weight, element), so every rank and every resumed run draws the
same, and no state is kept. `Compensated` keeps what rounding cut off in 8 bits beside the weight: 3 bytes a weight, no
randomness. `Rounding` itself loses such steps, and is there to be compared with. fp32 weights pass all of them unchanged.

Source: stochastic: Zamirai et al. 2020 (arXiv 2010.06192), Ozkara et al. 2025 (arXiv 2502.20566); the 8-bit remainder in
units of half the last bit: FlashOptim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from devices.base import place
from devices.kernels.calls import kernels_for
from devices.pointwise import fills_words, is_compiled, kernel, places_of_words, random_words, round_by_torch
from model.dropout import mix_number, stride

Keys = Sequence[int] | Tensor  # of `rounding_key`, one for each weight; int64, where they have been placed
CORRECTION_STEPS = 127  # steps of the 8-bit remainder in half a unit of the last place


class Rounding:
    """Reads rows of some weights (count, n, m) as fp32, and writes updated values back.

    This one rounds to nearest: steps below half of the last place are lost.
    """

    keeps_remainder = False  # of bf16 weights, a byte beside their own two

    def read(self, weight: Tensor, remainder: Tensor | None) -> Tensor:
        """fp32 values of a slice, to be overwritten and written back; of an fp32 weight, the slice itself."""
        return weight.float()

    def write(self, weight: Tensor, values: Tensor, remainder: Tensor | None, keys: Keys, offset: int) -> None:
        """Store fp32 values into a slice.

        Args:
            weight: fp32 or bf16. values: fp32, same shape; overwritten.
            remainder: int8, same shape, where the rounding keeps one.
            keys: from `rounding_key`, of each weight. offset: place of the slice's first element in its weight.
        """
        if weight.dtype == torch.float32:
            if values.data_ptr() != weight.data_ptr():
                weight.copy_(values)
        else:
            self._write_bf16(weight, values.contiguous(), remainder, keys, offset)

    def _write_bf16(self, weight: Tensor, values: Tensor, remainder: Tensor | None, keys: Keys, offset: int) -> None:
        weight.copy_(values)


class Stochastic(Rounding):
    """Rounds by chance."""

    def _write_bf16(self, weight: Tensor, values: Tensor, remainder: Tensor | None, keys: Keys, offset: int) -> None:
        if compiled := kernels_for(weight, values):
            compiled.round_weights(values, weight, int(keys[0]), offset)
            return
        weight.copy_(round_stochastically(values, keys, offset))


class Compensated(Rounding):
    """Rounds to nearest and keeps the remainder in 8 bits: about 16 bits of mantissa in all."""

    keeps_remainder = True

    def read(self, weight: Tensor, remainder: Tensor | None) -> Tensor:
        """fp32 values, the remainder added."""
        values = super().read(weight, remainder)
        if remainder is not None and weight.dtype == torch.bfloat16:
            values.addcmul_(remainder.float(), half_last_place(weight), value=1 / CORRECTION_STEPS)
        return values

    def _write_bf16(self, weight: Tensor, values: Tensor, remainder: Tensor | None, keys: Keys, offset: int) -> None:
        assert remainder is not None
        weight.copy_(values)
        left = values.sub_(weight.float()).div_(half_last_place(weight)).mul_(CORRECTION_STEPS)
        remainder.copy_(left.round_().clamp_(-CORRECTION_STEPS, CORRECTION_STEPS))


ROUNDINGS: dict[str, type[Rounding]] = {"stochastic": Stochastic, "compensated": Compensated, "nearest": Rounding}


def half_last_place(weight: Tensor) -> Tensor:
    """Half of the unit in the last place of bf16 values, fp32: 2^(exponent - 8), at least the smallest normal number."""
    power = (weight.contiguous().view(torch.int16).to(torch.int32) & 0x7F80) << 16
    return power.view(torch.float32).mul_(2.0**-8).clamp_(min=torch.finfo(torch.float32).tiny)


def rounding_key(seed: int, step: int, weight_index: int) -> int:
    """A key: different for each seed, step and weight. Hashed on the host, whatever the weight lies on."""
    key = seed % 2**62
    for number in (step, weight_index):
        key = mix_number(key + stride(number + 1))
    return key


def round_stochastically(values: Tensor, keys: Keys, offset: int) -> Tensor:
    """Round fp32 to bf16 so that the expectation is exact.

    Args:
        values: (count, ...) fp32, contiguous; overwritten.
        keys: from `rounding_key`, one for each of count.
        offset: place of the first element in its weight; how a weight is cut into chunks makes no difference.
    Returns:
        bf16 of the same shape; inf and nan stay what they are. Memory: 11 bytes an element while running.
    """
    (words, before), count = divmod(offset, 4), values[0].numel()  # a key's numbers come in words of four
    keys = torch.tensor(keys) if not isinstance(keys, Tensor) else keys
    first = place(keys, values.device) + stride(words) if words else place(keys, values.device)
    if (
        not before
        and fills_words(values)
        and values.shape[-1] % 4 == 0
        and is_compiled("round_randomly", values.device)
    ):
        lines = values.view(len(values), -1, values.shape[-1])
        places = places_of_words(lines.shape[1], lines.shape[2] // 4, values.device)
        return kernel("round_randomly", values.device)(lines, first, *places).view(values.shape)
    return round_by_torch(values, random_words(first, before + count)[:, before:].reshape(values.shape))
