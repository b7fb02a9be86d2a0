"""CoSENT's loss in closed form is the sum over all pairs of rows, and holds no matrix of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.objectives.embedding import EmbeddingObjective, Texts
from model.embedding_head import EmbeddingHead
from settings.declared import T5ModelConfig

TEMPERATURE = 0.05
WIDTH = 6


def texts(rows: int) -> Texts:
    """Pairs with a number each, of which some are equal."""
    generator = torch.Generator().manual_seed(rows)
    vectors = torch.randn(2 * rows, WIDTH, generator=generator)
    grades = torch.randint(0, 4, (rows, 1), generator=generator).float()
    return Texts(vectors, torch.arange(2 * rows), torch.full((rows,), 2), grades)


def over_all_pairs(rows: Texts) -> Tensor:
    first, second = F.normalize(rows.vectors.double(), dim=-1).view(-1, 2, WIDTH).unbind(1)
    cosines = (first * second).sum(-1)
    differences = (cosines[:, None] - cosines) / TEMPERATURE
    is_less_alike = rows.targets < rows.targets.T
    return len(cosines) * F.pad(differences[is_less_alike], (1, 0)).logsumexp(0)


@pytest.mark.parametrize("rows", [1, 2, 50])
def test_the_loss_is_that_of_all_pairs_of_rows(rows: int) -> None:
    head = EmbeddingHead(T5ModelConfig(d_model=WIDTH, head="embedding"))
    objective = EmbeddingObjective(head, "cosent", TEMPERATURE)
    assert objective.loss_of(texts(rows)) == pytest.approx(float(over_all_pairs(texts(rows))), rel=1e-5)


def test_many_rows_are_graded_at_once() -> None:
    """A matrix of these pairs of rows would take 40 GB."""
    objective = EmbeddingObjective(EmbeddingHead(T5ModelConfig(d_model=WIDTH, head="embedding")), "cosent")
    assert objective.loss_of(texts(100_000)) > 0
