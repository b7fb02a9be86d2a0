"""Dropout: independent draws, and the gradient of one activation that is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.dropout import Dropout
from model.rows import Rows, one_padded_group

CPU = torch.device("cpu")


def keys(count: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(seed))


def kept(dropout: Dropout, width: int) -> Tensor:
    """(N, width) bool: which elements stay."""
    return dropout(torch.ones(dropout.rows.num_tokens, width)) != 0


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1].item()


@pytest.mark.parametrize("compiled", [True], indirect=True)
def test_sites_rows_and_tokens_are_independent(compiled: bool) -> None:
    dropout = Dropout(0.5, Rows((100, 100), keys(2)))
    mask = kept(dropout, 200)
    assert abs(correlation(mask[:100], mask[100:])) < 0.03  # rows
    assert abs(correlation(mask[:99], mask[1:100])) < 0.03  # tokens
    assert abs(correlation(mask[:, :-1], mask[:, 1:])) < 0.03  # elements
    for offset in (1, 2, 16, 1 << 20):
        assert abs(correlation(mask, kept(dropout.at(offset), 200))) < 0.03  # sites
    assert torch.equal(mask, kept(dropout, 200))


def test_relu_and_dropout_keep_one_activation_and_give_its_gradient() -> None:
    dropout = Dropout(0.4, one_padded_group((16,), keys(1)))
    x = torch.randn(16, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    dropout.begin(CPU)
    y = dropout.of_relu(leaf * 1.0)
    (y * 1.0).sum().backward()
    dropout.begin(CPU)
    expected = x.clamp(min=0) * kept(dropout, 50) / 0.6
    torch.testing.assert_close(y.detach(), expected)
    torch.testing.assert_close(leaf.grad, (expected > 0) / 0.6, check_dtype=False)
