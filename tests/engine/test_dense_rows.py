"""Rows that are padded and lie side by side give the losses and gradients of rows that lie end to end, and of the plain
T5.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data.batches.collate import Batch, LabelledBatch, PreferenceRow, Row, collate, collate_preferences
from devices.kernels import calls
from engine.blockwise import Objective
from engine.objectives.labels import LabelObjective
from engine.objectives.preference import PreferenceLoss, PreferenceObjective
from engine.step import to_micro_batch
from engine.weights import weight_store_for
from model import hf_format
from model.lora.adapter import adapters_of, add_adapters
from model.lora.form import LoraSettings
from model.loss import LossSettings
from model.t5 import T5
from tests.engine.small_models import (
    Rectangle,
    assert_near,
    blockwise_of,
    pass_gradients,
    rectangle_gradients,
    reference_gradients,
    small_model,
)

CPU = torch.device("cpu")
LONG = Rectangle(4, 90, 40)
LENGTHS = {
    "equal": ((32, 16),) * 6,
    "ragged": tuple((1 + 37 * n % 90, 1 + 11 * n % 40) for n in range(1, 14)),
}


def rows_of(kind: str) -> list[Row]:
    draw = np.random.default_rng(3)
    return [Row(draw.integers(2, 61, s), draw.integers(2, 61, t), 7 * n) for n, (s, t) in enumerate(LENGTHS[kind])]


def preferences() -> Batch:
    draw = np.random.default_rng(4)
    rows = [
        PreferenceRow(row.input_ids, row.labels, draw.integers(2, 61, 3 + n), row.key, np.zeros(2, np.float32))
        for n, row in enumerate(rows_of("ragged"))
    ]
    return collate_preferences(rows, 0)


def labels(head: str) -> Batch:
    batch = collate(rows_of("ragged"), 0)
    lengths = batch.input_lengths
    is_token = np.arange(batch.input_ids.shape[1]) < lengths[:, None]
    targets = np.where(is_token, batch.input_ids % 3, -100) if head == "token" else lengths[:, None] % 3
    return LabelledBatch(batch.input_ids, lengths, targets, 0 * lengths, batch.keys)


def check(
    model: T5,
    batch: Batch,
    saved: int = 0,
    objective: Callable[[T5], Objective] = lambda model: Objective(),
    storage: torch.dtype = torch.float32,
) -> None:
    if calls.kernels() is None:
        pytest.skip(f"no compiled kernels: {calls.why_none()}")
    store = weight_store_for(storage, torch.float32, (model.embedding, model.output_weight))
    smoothing = LossSettings(label_smoothing=0.1)
    blockwise = blockwise_of(model, saved, store, loss=smoothing, objective=objective(model))
    results = []
    for is_compiled in (True, False):
        calls.use(is_compiled)
        micro_batch = to_micro_batch(batch, model.config, CPU)
        assert bool(micro_batch.source.groups) == (not is_compiled)
        results.append(pass_gradients(blockwise, [micro_batch], 10))
    assert_near(results[1], results[0], loss_tolerance=1e-5)


@pytest.mark.parametrize(("kind", "family", "saved"), [("equal", "t5", 0), ("ragged", "umt5", 99)])
def test_of_texts(kind: str, family: str, saved: int) -> None:
    check(small_model(family, d_kv=16), collate(rows_of(kind), 0), saved)


def test_of_texts_as_of_the_plain_model() -> None:
    calls.use(False)
    model = small_model(d_kv=16)
    assert_near(rectangle_gradients(blockwise_of(model, 1), LONG), reference_gradients(model, LONG))


def test_of_preferences() -> None:
    check(small_model(d_kv=16), preferences(), 99, lambda _: PreferenceObjective(PreferenceLoss("sigmoid", 0.1)))


@pytest.mark.parametrize(("head", "decoder_layers"), [("token", 0), ("sequence", 2)])
def test_of_labels(head: str, decoder_layers: int) -> None:
    shape = {"head": head, "labels": "3", "num_decoder_layers": decoder_layers}
    check(small_model(d_kv=16, **shape), labels(head), 0, lambda model: LabelObjective(model.label_head))


def test_of_adapters_over_int8(tmp_path: Path) -> None:
    hf_format.save(small_model(d_kv=16), tmp_path)
    model = hf_format.load(tmp_path, torch.int8)
    add_adapters(model, LoraSettings(3, 6.0, ("q", "v", "o", "wo")), seed=3)
    for adapter in adapters_of(model).values():
        adapter.b.data.normal_(generator=torch.Generator().manual_seed(9)).mul_(0.1)
    check(model, collate(rows_of("ragged"), 0), storage=torch.int8)
