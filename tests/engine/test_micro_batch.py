"""Fillers make few shapes and no difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.batches.collate import Batch, Row, collate
from engine.blockwise import Blockwise
from engine.step import to_micro_batch
from engine.weights import WeightStore
from model.loss import IGNORED, LossSettings
from model.micro_batch import MicroBatch
from settings.declared import T5ModelConfig
from tests.engine.small_models import relative_error, small_model

CPU = torch.device("cpu")


def batch(rows: int, seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(3, 30, (rows, 2))
    return collate([Row(draw.integers(2, 61, s), draw.integers(2, 61, t), int(s * 77 + t)) for s, t in lengths], 0)


def result(family: str, micro_batch: MicroBatch, saved: int) -> tuple[float, dict[str, torch.Tensor]]:
    model = small_model(family)
    blockwise = Blockwise(model, saved, WeightStore(torch.float32), LossSettings(), dropout_rate=0.3)
    loss = float(blockwise.gradients([micro_batch], micro_batch.num_labels))
    return loss, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(("family", "saved"), [("t5", 0), ("umt5", 9)])
def test_filled_up_rows_give_the_same_loss_and_gradients(family: str, saved: int) -> None:
    rows = batch(3, 5)
    exact = (int(rows.input_lengths.sum()),), (int(rows.target_lengths.sum()),)
    plain, filled = (to_micro_batch(rows, T5ModelConfig(), CPU, sizes) for sizes in (exact, ((), ())))
    assert plain.input_ids.shape != filled.input_ids.shape and plain.num_labels == filled.num_labels
    loss, gradients = result(family, plain, saved)
    other_loss, other_gradients = result(family, filled, saved)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        assert relative_error(other_gradients[name], gradient) < 1e-5, name


def test_batches_of_many_lengths_have_few_shapes() -> None:
    micro_batches = [
        to_micro_batch(batch(5, seed), T5ModelConfig(), CPU, ((64, 96, 160), (80, 160))) for seed in range(200)
    ]
    assert {len(micro_batch.input_ids) for micro_batch in micro_batches} == {64, 96, 160}
    assert (
        {len(micro_batch.decoder_ids) for micro_batch in micro_batches}
        == {len(micro_batch.labels) for micro_batch in micro_batches}
        == {80, 160}
    )


def test_fillers_belong_to_no_row_and_no_label_judges_them() -> None:
    rows = [Row(np.arange(2, 10), np.arange(2, 7), 5), Row(np.arange(2, 10), np.arange(2, 9), 6)]
    micro_batch = to_micro_batch(collate(rows, 0), T5ModelConfig(), CPU, ((24,), (13, 20)))
    assert micro_batch.source.lengths == (8, 8) and micro_batch.target.lengths == (5, 7)
    assert (micro_batch.source.filler, micro_batch.target.filler) == (8, 1)
    assert len(micro_batch.input_ids) == micro_batch.source.num_tokens == 24 and len(micro_batch.labels) == 13
    assert (
        (micro_batch.labels[12:] == IGNORED).all()
        and (micro_batch.input_ids[16:] == 0).all()
        and micro_batch.num_labels == 12
    )
