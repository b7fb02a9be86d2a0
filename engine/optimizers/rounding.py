"""How bf16 weights take steps smaller than their last bit: they are rounded up or down by chance, right on average.

A random 16-bit number is added below bf16's last bit before the rest is cut off. The numbers are a hash of (seed, step,
weight, element), so every rank and every resumed run draws the same, and no state is kept.

Source: Zamirai et al. 2020 (arXiv 2010.06192), Ozkara et al. 2025 (arXiv 2502.20566).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from devices.base import place
from devices.kernels.calls import kernels_for
from devices.pointwise import fills_words, is_compiled, random_words, round_by_torch, round_in_one_kernel
from model.dropout import mix_number, stride

Keys = Sequence[int] | Tensor  # of `rounding_key`, one for each weight; int64, where they have been placed


def write_rounded(weight: Tensor, values: Tensor, keys: Keys, offset: int) -> None:
    """Store fp32 values in rows of some weights; a bf16 weight is rounded stochastically.

    Args:
        weight: (count, n, m), fp32 or bf16.
        values: fp32, same shape; overwritten. May be the fp32 weight itself.
        keys: from `rounding_key`, of each weight.
        offset: position of the first element in its whole weight.
    """
    if weight.dtype == torch.float32:
        if values.data_ptr() != weight.data_ptr():
            weight.copy_(values)
        return
    values = values.contiguous()
    if compiled := kernels_for(weight, values):
        compiled.round_weights(values, weight, int(keys[0]), offset)
    else:
        weight.copy_(round_stochastically(values, keys, offset))


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
    if not before and fills_words(values) and is_compiled(values.device):
        lines = values.view(len(values), -1, values.shape[-1])
        return round_in_one_kernel(lines, first).view(values.shape)
    return round_by_torch(values, random_words(first, before + count)[:, before:].reshape(values.shape))
