"""The nearest vectors, block by block, are those that all cosines together give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.nearest import NONE, nearest

QUERIES = F.normalize(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
VECTORS = F.normalize(torch.randn(40, 5, generator=torch.Generator().manual_seed(1)), dim=-1)


def in_blocks(size: int) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.arange(100, 100 + len(VECTORS))
    return list(zip(numbers.split(size), VECTORS.split(size), strict=True))


@pytest.mark.parametrize("size", [1, 7, 40])
@pytest.mark.parametrize("count", [1, 6, 45])
def test_the_best_of_all_are_found(size: int, count: int) -> None:
    cosines, numbers = nearest(QUERIES, in_blocks(size), count)
    expected, places = (QUERIES @ VECTORS.T).sort(descending=True)
    torch.testing.assert_close(cosines[:, :40], expected[:, :count])
    assert torch.equal(numbers[:, :40], 100 + places[:, :count])
    assert (numbers[:, 40:] == NONE).all()


def test_what_is_hidden_is_not_found() -> None:
    def hide(cosines: Tensor, numbers: Tensor) -> None:
        cosines[:, numbers % 2 == 0] = -torch.inf

    _, numbers = nearest(QUERIES, in_blocks(7), 25, hide)
    assert (numbers[:, :20] % 2 == 1).all() and (numbers[:, 20:] == NONE).all()
