"""Rows that share a sequence do not see each other: their loss is that of each row alone, without masks or padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data.batches.collate import Row, collate
from data.prepare.preparing import prepare
from engine.blockwise import Blockwise
from engine.step import to_micro_batch
from engine.weights import WeightStore
from model.loss import LossSettings
from model.t5 import T5
from tests.data.loaders import loader_of
from tests.engine.small_models import small_model


def losses(model: T5, batches: list[Any]) -> list[float]:
    """Summed loss of each batch, all its rows laid end to end."""
    blockwise = Blockwise(model, 99, WeightStore(torch.float32), LossSettings(), 0.0)
    device = torch.device("cpu")
    with torch.no_grad():
        return [float(blockwise.loss([to_micro_batch(batch, model.config, device)])) for batch in batches]


@pytest.mark.parametrize(("family", "objective"), [("t5", "pairs"), ("umt5", "ul2")])
def test_packed_rows_have_the_loss_of_rows_alone(configure: Any, request: Any, family: str, objective: str) -> None:
    file = request.getfixturevalue("pairs_file" if objective == "pairs" else "text_file")
    config = configure(train_file=file, objective=objective, max_seq_len=48)
    prepared = prepare(config)
    loader = loader_of(prepared.train_dir, objective, config)
    alone = loader.micro_batches(0, effective_batch_size=12, batch_size=1)
    packed = loader.micro_batches(0, effective_batch_size=12, batch_size=12)
    assert len({int(batch.input_lengths[0]) for batch in alone}) > 1 and [b.num_rows for b in packed] == [12]
    model = small_model(family, vocab_size=384)
    single, together = losses(model, alone), losses(model, packed)
    assert together[0] == pytest.approx(sum(single), rel=1e-5)
    for two in (alone[0:2], alone[5:7]):  # any neighbours
        rows = [row for batch in two for row in rows_of(batch)]
        assert losses(model, [collate(rows, 0)])[0] == pytest.approx(sum(losses(model, two)), rel=1e-5)


def rows_of(batch: Any) -> list[Any]:
    return [
        Row(batch.input_ids[row, : batch.input_lengths[row]], batch.labels[row, : batch.target_lengths[row]], 0)
        for row in range(batch.num_rows)
    ]
