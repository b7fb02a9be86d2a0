"""How does a bf16 weight take a step smaller than its last bit? It is rounded up or down by chance, right on average.

Stochastic rounding: a random 16-bit number is added below bf16's last bit before the rest is cut off. The numbers are a
hash of (seed, step, weight, element), so every rank and every resumed run draws the same, and no state is kept.
Source: Zamirai et al. 2020 (arXiv 2010.06192); Ozkara et al. 2025 (arXiv 2502.20566) for training with it throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.dropout import mix, random_words, stride


def rounding_key(seed: int, step: int, weight_index: int, device: torch.device) -> Tensor:
    """A scalar int64 key: different for each seed, step and weight."""
    key = torch.tensor(seed % 2**62, device=device)
    for number in (step, weight_index):
        key = mix(key + stride(number + 1))
    return key


def round_stochastically(values: Tensor, key: Tensor, offset: int) -> Tensor:
    """Round fp32 to bf16 so that the expectation is exact.

    Args:
        values: fp32, contiguous, any shape; overwritten.
        key: scalar from `rounding_key`.
        offset: place of the first element in its weight, so that chunks draw what the whole would draw;
            a multiple of 4 or anything, as long as chunks are cut at the same places.
    Returns:
        bf16 of the same shape. Memory: 10 bytes an element while running.
    """
    noise = random_words(key + offset, values.numel()).to(torch.int32).bitwise_and_(0xFFFF)
    bits = values.view(torch.int32)
    bits += noise.view(values.shape)
    bits &= -65536
    return values.to(torch.bfloat16)


def write_back(weight: Tensor, values: Tensor, key: Tensor | None, offset: int) -> None:
    """Store updated fp32 values into a slice of a weight: as they are in fp32, rounded by chance in bf16.

    Args:
        weight: the slice to write, fp32 or bf16. values: fp32, same shape; overwritten.
        key: needed for bf16; None rounds to nearest (which loses small steps).
    """
    if weight.dtype == torch.float32 or key is None:
        weight.copy_(values)
    else:
        weight.copy_(round_stochastically(values.contiguous(), key, offset))
