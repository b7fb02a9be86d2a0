"""Rows that share a sequence do not see each other: their loss is that of each row alone, without masks or padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data.batches.collate import Row, collate
from engine.blockwise import Blockwise
from engine.step import to_micro_batch
from engine.weights import WeightStore
from model.loss import LossSettings
from model.t5 import T5
from tests.data.batches.conftest import MakeLoader
from tests.engine.small_models import small_model


def losses(model: T5, batches: list[Any]) -> list[float]:
    """Summed loss of each batch, all its rows laid end to end."""
    blockwise = Blockwise(model, 99, WeightStore(torch.float32), LossSettings(), 0.0)
    device = torch.device("cpu")
    with torch.no_grad():
        return [float(blockwise.loss([to_micro_batch(batch, model.config, device)])) for batch in batches]


def rows_of(batch: Any) -> list[Row]:
    return [
        Row(batch.input_ids[row, : batch.input_lengths[row]], batch.labels[row, : batch.target_lengths[row]], 0)
        for row in range(batch.num_rows)
    ]


@pytest.mark.parametrize(("family", "objective"), [("t5", "pairs"), ("umt5", "ul2")])
def test_packed_rows_have_the_loss_of_rows_alone(make_loader: MakeLoader, family: str, objective: str) -> None:
    loader = make_loader(objective, max_seq_len=48)
    alone = loader.micro_batches(0, effective_batch_size=8, batch_size=1)
    packed = loader.micro_batches(0, effective_batch_size=8, batch_size=8)
    assert len({int(batch.input_lengths[0]) for batch in alone}) > 1 and [b.num_rows for b in packed] == [8]
    neighbours = collate([row for batch in alone[5:7] for row in rows_of(batch)], 0)
    single = losses(small_model(family, vocab_size=384), alone)
    together = losses(small_model(family, vocab_size=384), [*packed, neighbours])
    assert together == pytest.approx([sum(single), sum(single[5:7])], rel=1e-5)
