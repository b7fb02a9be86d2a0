"""A head over labels: gradients of a blockwise pass are those of plain autograd, whatever the micro-batches and saved
blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from data.batches.collate import LabelledBatch
from engine.blockwise import Blockwise
from engine.objectives.labels import LabelObjective
from engine.step import to_micro_batch
from engine.weights import WeightStore
from model.micro_batch import MicroBatch
from model.t5 import T5
from settings.declared import T5ModelConfig
from tests.engine.small_models import (
    Collected,
    Gradients,
    assert_near,
    blockwise_of,
    pass_gradients,
    small_model,
    taken_gradients,
)

CPU = torch.device("cpu")
LENGTHS = (5, 3, 7, 1)
SMALL = [[3], [0, 2], [1]]
KINDS: dict[str, dict[str, Any]] = {
    "numbers": {"head": "sequence", "labels": "regression", "num_decoder_layers": 0},
    "first": {
        "head": "sequence",
        "labels": "a,b,c",
        "num_decoder_layers": 0,
        "pooling": "first",
        "head_kind": "linear",
    },
    "tokens": {"head": "token", "labels": "3", "num_decoder_layers": 0},
    "decoder": {"head": "sequence", "labels": "3", "num_decoder_layers": 2},
}


def rows_of(config: T5ModelConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids (4, 7), mask, labels (4, 1) or (4, 7), some of which carry no loss."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(3, config.vocab_size, (4, 7), generator=generator) * mask
    labels = torch.randint(0, 3, (4, 7 if config.head == "token" else 1), generator=generator)
    if config.labels == "regression":
        numbers = torch.randn(4, 1, generator=generator)
        numbers[2] = torch.nan
        return ids, mask.long(), numbers
    labels = labels.masked_fill(~mask, -100) if config.head == "token" else labels
    labels[0, 0] = -100
    return ids, mask.long(), labels


def micro_batches(config: T5ModelConfig, cuts: list[list[int]]) -> list[MicroBatch]:
    """They are filled up with tokens of no row."""
    ids, _, labels = rows_of(config)
    lengths = np.array(LENGTHS)
    parts = []
    for rows in cuts:
        batch = LabelledBatch(
            ids[rows].numpy(), lengths[rows], labels[rows].numpy(), 0 * lengths[rows], lengths[rows] * 77
        )
        parts.append(to_micro_batch(batch, config, CPU, ((16, 24), ())))
    return parts


def labelled(model: T5, saved: int = 0, rate: float = 0.0, store: WeightStore | None = None, **more: Any) -> Blockwise:
    assert model.label_head is not None
    objective = LabelObjective(model.label_head, None, rate)
    return blockwise_of(model, saved, store, rate, objective=objective, **more)


def one_pass(blockwise: Blockwise, cuts: list[list[int]]) -> Gradients:
    parts = micro_batches(blockwise.model.config, cuts)
    collected = Collected()
    loss, gradients = pass_gradients(blockwise, parts, sum(part.num_labels for part in parts), collected)
    assert len(collected.weights) == len({id(weight) for weight in collected.weights}) == len(gradients)
    return loss, gradients


@pytest.mark.parametrize(("kind", "saved"), [("numbers", 0), ("first", 99), ("tokens", 0), ("decoder", 99)])
def test_gradients_equal_plain_autograd(kind: str, saved: int) -> None:
    model = small_model("t5", d_kv=16 if saved else 8, **KINDS[kind])
    ids, mask, labels = rows_of(model.config)
    loss = model(ids, mask, labels)
    loss.backward()
    expected = (loss.item(), taken_gradients(model))
    blockwise = labelled(model, saved)
    assert_near(one_pass(blockwise, [[0, 2], [1, 3]]), expected)
    parts = micro_batches(model.config, [[1, 3], [0, 2]])
    count = sum(part.num_labels for part in parts)
    assert float(blockwise.loss(parts)) / count == pytest.approx(loss.item(), rel=1e-6)
    predicted = blockwise.predict(micro_batches(model.config, [[0, 1, 2, 3]]))[0]
    logits = model.label_logits(ids, mask)
    assert torch.allclose(predicted, logits[mask.bool()] if kind == "tokens" else logits, atol=1e-6)


@pytest.mark.parametrize(("compiled", "cuts"), [(True, [[0, 1, 2, 3]]), (False, SMALL)], indirect=["compiled"])
def test_dropout_of_the_head_is_drawn_again_and_if_compiled_does_not_depend_on_micro_batches(
    compiled: bool, cuts: list[list[int]]
) -> None:
    model = small_model("t5", d_kv=16 if compiled else 8, **KINDS["tokens"])
    expected = one_pass(labelled(model, 99, 0.3), cuts)
    assert_near(one_pass(labelled(model, 0, 0.3), SMALL), expected)


def test_class_weights_are_factors_on_the_loss_of_each_class() -> None:
    model = small_model("t5", **KINDS["tokens"])
    assert model.label_head is not None
    parts = micro_batches(model.config, [[0, 1, 2, 3]])
    losses = []
    for weights in ((1.0, 0.0, 0.0), (0.0, 1.0, 1.0), (2.0, 1.0, 1.0)):
        objective = LabelObjective(model.label_head, weights)
        losses.append(float(blockwise_of(model, objective=objective).loss(parts)))
    first, second, both = losses
    assert first > 0 and both == pytest.approx(2 * first + second, rel=1e-5)
