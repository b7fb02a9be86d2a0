"""Dropout: compiled kernels drop the same however a batch is cut; torch draws the same again from the same site."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.dropout import Dropout
from model.rows import Rows, side_by_side

CPU = torch.device("cpu")
COMPILED = pytest.mark.parametrize("compiled", [True], indirect=True)


def keys(count: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(seed))


def kept(dropout: Dropout, width: int) -> Tensor:
    """(N, width) bool: which elements stay."""
    return dropout(torch.ones(dropout.rows.num_tokens, width)) != 0


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1].item()


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_rate_and_mean(rate: float, compiled: bool) -> None:
    dropout = Dropout(rate, Rows((200, 300), keys(2)))
    out = dropout(torch.ones(500, 256))
    share = (out == 0).double().mean().item()
    deviation = (rate * (1 - rate) / out.numel()) ** 0.5
    assert abs(share - rate) < 5 * deviation + 2**-16
    assert out.double().mean().item() == pytest.approx(1.0, abs=5 * deviation / (1 - rate))
    assert len(out.unique()) == 2


@COMPILED
def test_sites_rows_and_tokens_are_independent(compiled: bool) -> None:
    dropout = Dropout(0.5, Rows((100, 100), keys(2)))
    mask = kept(dropout, 200)
    assert abs(correlation(mask[:100], mask[100:])) < 0.03  # rows
    assert abs(correlation(mask[:99], mask[1:100])) < 0.03  # tokens
    assert abs(correlation(mask[:, :-1], mask[:, 1:])) < 0.03  # elements
    for offset in (1, 2, 16, 1 << 20):
        assert abs(correlation(mask, kept(dropout.at(offset), 200))) < 0.03  # sites
    assert torch.equal(mask, kept(dropout, 200))


@COMPILED
def test_the_cut_of_the_batch_does_not_matter(compiled: bool) -> None:
    lengths, row_keys = (5, 1, 9, 3), keys(4)
    whole = kept(Dropout(0.3, Rows(lengths, row_keys), site=7), 33)
    alone = [kept(Dropout(0.3, Rows((n,), row_keys[i : i + 1]), site=7), 33) for i, n in enumerate(lengths)]
    assert torch.equal(whole, torch.cat(alone))
    order = [2, 0, 3, 1]
    other = kept(Dropout(0.3, Rows(tuple(lengths[i] for i in order), row_keys[order]), site=7), 33)
    assert torch.equal(other, torch.cat([alone[i] for i in order]))


def test_torch_draws_the_same_again_from_the_same_site_and_first_row() -> None:
    def drawn(row_keys: Tensor, site: int) -> Tensor:
        dropout = Dropout(0.5, side_by_side((9, 30), row_keys), site)
        torch.rand(3)  # whatever else draws
        dropout.begin(CPU)
        return kept(dropout, 40)

    first = drawn(keys(2), 7)
    assert torch.equal(first, drawn(keys(2), 7))
    for other in (drawn(keys(2), 8), drawn(keys(2, seed=1), 7), drawn(keys(2), 7 + (1 << 20))):
        assert abs(correlation(first, other)) < 0.06


def test_relu_and_dropout_keep_one_activation_and_give_its_gradient() -> None:
    dropout = Dropout(0.4, side_by_side((16,), keys(1)))
    x = torch.randn(16, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    dropout.begin(CPU)
    y = dropout.of_relu(leaf * 1.0)
    (y * 1.0).sum().backward()
    dropout.begin(CPU)
    expected = x.clamp(min=0) * kept(dropout, 50) / 0.6
    torch.testing.assert_close(y.detach(), expected)
    torch.testing.assert_close(leaf.grad, (expected > 0) / 0.6, check_dtype=False)
