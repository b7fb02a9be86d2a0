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
from engine.blockwise import Blockwise, Objective
from engine.objectives.labels import LabelObjective
from engine.objectives.preference import PreferenceLoss, PreferenceObjective
from engine.step import to_micro_batch
from engine.weights import weight_store_for
from model import hf_format
from model.lora.adapter import adapters_of, add_adapters
from model.lora.form import LoraSettings
from model.loss import LossSettings
from model.reference import T5Reference
from model.t5 import T5
from tests.engine.small_models import relative_error, small_model

CPU = torch.device("cpu")
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
    found = np.where(is_token, batch.input_ids % 3, -100) if head == "token" else lengths[:, None] % 3
    return LabelledBatch(batch.input_ids, lengths, found, 0 * lengths, batch.keys)


def gradients(
    model: T5, batch: Batch, saved: int, objective: Callable[[T5], Objective], is_compiled: bool, storage: torch.dtype
) -> tuple[float, dict[str, torch.Tensor]]:
    calls.use(is_compiled)
    store = weight_store_for(storage, torch.float32, (model.embedding, model.output_weight))
    blockwise = Blockwise(model, saved, store, LossSettings(label_smoothing=0.1), 0.0, objective(model))
    micro_batch = to_micro_batch(batch, model.config, CPU)
    assert bool(micro_batch.source.groups) == (not is_compiled)
    loss = float(blockwise.gradients([micro_batch], 10))
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return loss, found


def check(
    model: T5,
    batch: Batch,
    saved: int,
    objective: Callable[[T5], Objective] = lambda model: Objective(),
    storage: torch.dtype = torch.float32,
) -> None:
    if calls.kernels() is None:
        pytest.skip(f"no compiled kernels: {calls.why_none()}")
    loss, expected = gradients(model, batch, saved, objective, True, storage)
    ours, dense = gradients(model, batch, saved, objective, False, storage)
    assert ours == pytest.approx(loss, rel=1e-5) and dense.keys() == expected.keys()
    assert max(relative_error(dense[name], expected[name]) for name in expected) < 1e-5


@pytest.mark.parametrize("saved", [0, 99])
@pytest.mark.parametrize(("kind", "family"), [("equal", "t5"), ("ragged", "t5-v1.1"), ("ragged", "umt5")])
def test_of_texts(kind: str, family: str, saved: int) -> None:
    check(small_model(family, d_kv=16), collate(rows_of(kind), 0), saved)


@pytest.mark.parametrize("kind", ["equal", "ragged"])
def test_of_texts_as_of_the_plain_model(kind: str) -> None:
    model, batch = small_model("t5", d_kv=16), collate(rows_of(kind), 0)
    reference = T5Reference(model.config)
    reference.load_state_dict(model.state_dict())
    ids, targets = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
    mask = (torch.arange(ids.shape[1]) < torch.from_numpy(batch.input_lengths)[:, None]).long()
    loss = reference(ids, mask, targets)
    (loss * batch.num_labels / 10).backward()
    calls.use(False)
    blockwise = Blockwise(model, 1, weight_store_for(torch.float32, torch.float32), LossSettings(), 0.0)
    ours = float(blockwise.gradients([to_micro_batch(batch, model.config, CPU)], 10))
    assert ours == pytest.approx(loss.item() * batch.num_labels, rel=1e-5)
    expected = dict(reference.named_parameters())
    for name, weight in model.named_parameters():
        assert relative_error(weight.grad, expected[name].grad) < 1e-5, name


@pytest.mark.parametrize("saved", [0, 99])
def test_of_preferences(saved: int) -> None:
    check(small_model(d_kv=16), preferences(), saved, lambda _: PreferenceObjective(PreferenceLoss("sigmoid", 0.1)))


@pytest.mark.parametrize(("head", "decoder_layers"), [("token", 0), ("sequence", 0), ("sequence", 2)])
def test_of_labels(head: str, decoder_layers: int) -> None:
    shape = {"head": head, "labels": "3", "num_decoder_layers": decoder_layers}
    check(small_model(d_kv=16, **shape), labels(head), 0, lambda model: LabelObjective(model.label_head))


@pytest.mark.parametrize("saved", [0, 99])
def test_of_adapters_over_int8(saved: int, tmp_path: Path) -> None:
    hf_format.save(small_model(d_kv=16), tmp_path)
    model = hf_format.load(tmp_path, torch.int8)
    add_adapters(model, LoraSettings(3, 6.0, ("q", "v", "o", "wo")), seed=3)
    for adapter in adapters_of(model).values():
        adapter.b.data.normal_(generator=torch.Generator().manual_seed(9)).mul_(0.1)
    check(model, collate(rows_of("ragged"), 0), saved, storage=torch.int8)
