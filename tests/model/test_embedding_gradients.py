"""The gradient of an embedding is the sum over its tokens, rounded once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from devices.base import CUDA, HOST, DeviceTraits, override_traits
from model.embedding_gradients import add_token_gradients

VOCABULARY, WIDTH = 50, 24


def draw(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of which one is frequent, and gradients that do not cancel out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    ids[torch.rand(tokens, generator=generator) < 0.5] = 7
    return ids, torch.randn(tokens, WIDTH, generator=generator).add_(1.0).bfloat16()


@pytest.mark.parametrize("traits", [HOST, replace(CUDA, summed_elements=9000)], ids=["CPU", "GPU"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_row_is_rounded_once(dtype: torch.dtype, traits: DeviceTraits) -> None:
    parts = [draw(tokens, seed) for seed, tokens in enumerate((3000, 10, 1))]
    table = torch.full((VOCABULARY, WIDTH), 0.25, dtype=dtype)
    with override_traits("cpu", traits):
        add_token_gradients(table, [ids for ids, _ in parts], [grad for _, grad in parts])
    exact = torch.full((VOCABULARY, WIDTH), 0.25, dtype=torch.float64)
    for ids, grad in parts:
        exact.index_add_(0, ids, grad.double())
    last_bit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    assert ((table.double() - exact).abs() <= last_bit * exact.abs() + 1e-5).all()
