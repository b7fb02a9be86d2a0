"""The losses over vectors and their gradients are those of one batch in plain autograd, however a step is cut and over
however many processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.batches.collate import EmbeddingRow
from engine.objectives.embedding import Texts
from model.rows import Rows
from model.t5 import T5
from settings.errors import UserError
from tests.engine.embedding_rows import KINDS, ROWS, embedding_model, objective_of, one_pass, texts_of
from tests.engine.small_models import Gradients, assert_near, taken_gradients
from tests.ranks import must_succeed

CHILD = Path(__file__).parents[1] / "children" / "embedding_child.py"
CUTS = {"one": [list(range(ROWS))], "each": [[row] for row in range(ROWS)], "uneven": [[4, 0, 2], [5], [1, 3]]}


def vectors_by_autograd(model: T5, rows: list[EmbeddingRow]) -> Tensor:
    """(R, V) of the texts of rows, one behind the other: the mean of each one's states, by itself."""
    assert model.embedding_head is not None
    pooled = []
    for text in texts_of(rows):
        ids = torch.from_numpy(text)
        hidden = model.encode(ids, Rows((len(ids),)))
        pooled.append(hidden.mean(0) if model.config.pooling == "mean" else hidden[0])
    dense = model.embedding_head.dense
    together = torch.stack(pooled)
    return together if dense is None else together @ dense.weight.T


def in_batch(queries: Tensor, documents: Tensor, temperature: float) -> Tensor:
    return F.cross_entropy(queries @ documents.T / temperature, torch.arange(len(queries)), reduction="sum")


def loss_by_autograd(kind: str, vectors: Tensor, rows: list[EmbeddingRow]) -> Tensor:
    """The loss as its source has it, times the rows."""
    first = np.cumsum([0, *(len(row.texts) for row in rows)])[:-1]
    directions = F.normalize(vectors, dim=-1)
    targets = torch.stack([torch.from_numpy(row.targets) for row in rows])
    if kind == "distillation":
        return (directions - F.normalize(targets, dim=-1)).square().mean(-1).sum()
    queries, positives = directions[first], directions[first + 1]
    if kind == "contrastive":
        negatives = np.setdiff1d(np.arange(len(vectors)), np.concatenate([first, first + 1]))
        documents = torch.cat([positives, directions[negatives]])
        return (in_batch(queries, documents, 0.1) + in_batch(positives, queries, 0.1)) / 2
    cosines = (queries * positives).sum(-1)
    numbers = targets[:, 0]
    if kind == "regression":
        return (cosines - numbers).square().sum()
    pairs = [(i, j) for i in range(len(rows)) for j in range(len(rows)) if numbers[i] < numbers[j]]
    total = 1 + sum(((cosines[i] - cosines[j]) / 0.1).exp() for i, j in pairs)
    return len(rows) * torch.as_tensor(total).log()


def expected(model: T5, kind: str, rows: list[EmbeddingRow], sizes: tuple[int, ...] = ()) -> Gradients:
    vectors = vectors_by_autograd(model, rows)
    loss = sum(loss_by_autograd(kind, vectors[:, :size], rows) for size in sizes or (vectors.shape[1],))
    loss = torch.as_tensor(loss) / len(rows)
    loss.backward()
    return loss.item(), taken_gradients(model)


@pytest.mark.parametrize("compiled", [True, False], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", CUTS)
def test_gradients_are_those_of_one_batch(compiled: bool, kind: str, cut: str) -> None:
    model = embedding_model(compiled, kind)
    rows = KINDS[kind]()
    assert_near(one_pass(model, kind, rows, CUTS[cut], saved=2 * (cut == "uneven")), expected(model, kind, rows))


@pytest.mark.parametrize("changes", [{"pooling": "first"}, {"embedding_size": 12}])
def test_heads(changes: dict[str, Any]) -> None:
    model = embedding_model(True, "contrastive", **changes)
    rows = KINDS["contrastive"]()
    assert_near(one_pass(model, "contrastive", rows, CUTS["uneven"]), expected(model, "contrastive", rows))


def test_the_loss_is_summed_over_sizes_of_the_vectors() -> None:
    model = embedding_model(True, "contrastive")
    rows = KINDS["contrastive"]()
    assert_near(
        one_pass(model, "contrastive", rows, CUTS["uneven"], sizes=(24, 8)),
        expected(model, "contrastive", rows, (24, 8)),
    )


@pytest.mark.parametrize("kind", ["cosent", "regression"])
def test_rows_without_a_score_have_no_loss_of_scores(kind: str) -> None:
    model = embedding_model(True, "contrastive")
    with pytest.raises(UserError, match="--label_column"):
        one_pass(model, kind, KINDS["contrastive"](), CUTS["uneven"])
    objective = objective_of(model, kind)
    vectors = torch.eye(4, 24)
    pairs = Texts(vectors, torch.arange(4), torch.tensor([2, 2]), torch.full((2, 1), torch.nan))
    assert objective.loss_of(pairs) > 0, "evaluation takes them"


def test_texts_that_belong_together_are_no_negatives() -> None:
    """A second row with the same first text, and one with the same second text, leave each other's texts out."""
    model = embedding_model(True, "contrastive")
    texts = [np.array([*range(5, 5 + size), 1]) for size in range(2, 6)]
    alone = np.full(1, np.nan, np.float32)
    rows = [EmbeddingRow([texts[first], texts[second]], alone, first) for first, second in ((0, 1), (0, 2), (3, 2))]
    vectors = F.normalize(vectors_by_autograd(model, rows).detach(), dim=-1)
    scores = vectors[::2] @ vectors[1::2].T / 0.1
    forward = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]])
    backward = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 1]])
    losses = [
        F.cross_entropy(scores.masked_fill(forward == 0, -torch.inf), torch.arange(3)),
        F.cross_entropy(scores.T.masked_fill(backward == 0, -torch.inf), torch.arange(3)),
    ]
    loss, _ = one_pass(model, "contrastive", rows, [[0, 1, 2]])
    assert loss == pytest.approx(sum(map(float, losses)) / 2, rel=1e-5)


@pytest.mark.parametrize("kind", ["contrastive", "cosent"])
def test_two_processes_compare_all_their_texts_and_neither_waits_for_one_that_failed(kind: str) -> None:
    must_succeed(CHILD, 2, kind)
