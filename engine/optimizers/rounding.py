"""How bf16 weights take steps smaller than their last bit: they are rounded up or down by chance, right on average.

A random 16-bit number is added below bf16's last bit before the rest is cut off. The numbers are a hash of (seed, step,
weight, element), so every rank and every resumed run draws the same however weights are grouped, and no state is kept.

Source: Zamirai et al. 2020 (arXiv 2010.06192), Ozkara et al. 2025 (arXiv 2502.20566).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from devices.kernels.calls import kernels_for
from devices.pointwise import (
    GOLDEN,
    fills_words,
    is_compiled,
    mix_by_torch,
    random_words,
    round_by_torch,
    round_in_one_kernel,
)
from model.dropout import mix_number, stride


def write_rounded(weights: Sequence[Tensor], values: Tensor, keys: Tensor, offset: int) -> None:
    """Store fp32 values in rows of some weights; bf16 weights are rounded stochastically.

    Args:
        weights: matrices of one shape, fp32 or bf16. values: (count, rows, m) fp32, overwritten; they may be a fp32
            weight itself. keys: (count,) int64 from `rounding_keys`, on the device of the weights.
        offset: position of the first element in its whole weight.
    """
    weight = weights[0]
    values = values.contiguous()
    if weight.dtype == torch.float32:
        if values.data_ptr() == weight.data_ptr():
            return
    elif compiled := kernels_for(weight, values):
        compiled.round_weights(values, weight, int(keys[0]), offset)
        return
    else:
        values = round_stochastically(values, keys, offset)
    torch._foreach_copy_(list(weights), values.unbind())


def rounding_keys(seed: int, step: int, numbers: Tensor) -> Tensor:
    """A key for each of the numbers of weights (count,): different for each seed, step and weight. Computed on the
    host.
    """
    key = mix_number(seed % 2**62 + stride(step + 1))
    return mix_by_torch((numbers + 1) * GOLDEN + key)


def round_stochastically(values: Tensor, keys: Tensor, offset: int) -> Tensor:
    """Round fp32 to bf16 so that the expectation is exact.

    Args:
        values: (count, ...) fp32, contiguous; overwritten.
        keys: (count,) int64 from `rounding_keys`, on the same device.
        offset: position of the first element in its weight; how a weight is cut into chunks makes no difference.
    Returns:
        bf16 of the same shape; inf and nan stay what they are. Memory: 11 bytes an element while running, 2 in one
        kernel.
    """
    words, skipped = divmod(offset, 4)  # A key's numbers come in words of four.
    keys = keys + stride(words) if words else keys
    if not skipped and fills_words(values) and is_compiled(values.device):
        matrices = values.view(len(values), -1, values.shape[-1])
        return round_in_one_kernel(matrices, keys).view(values.shape)
    noise = random_words(keys, skipped + values[0].numel())[:, skipped:]
    return round_by_torch(values, noise.reshape(values.shape))
