"""A row of padding makes few shapes and no difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.collate import Batch, Row, collate
from engine.keep import Keep
from engine.residency import Residency
from engine.slices import Slice, to_slice
from engine.walk import Walk
from model.loss import IGNORED, LossSettings
from tests.engine.small_models import FAMILIES, relative_error, small_model

CPU = torch.device("cpu")


def batch(rows: int, seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(3, 30, (rows, 2))
    return collate([Row(draw.integers(2, 61, s), draw.integers(2, 61, t), int(s * 77 + t)) for s, t in lengths], 0)


def result(family: str, part: Slice, kept: int) -> tuple[float, dict[str, torch.Tensor]]:
    model = small_model(family)
    walk = Walk(model, Keep(kept), Residency(torch.float32), LossSettings(), dropout_rate=0.3)
    loss = float(walk.gradients([part], part.num_labels, lambda weights: None))
    return loss, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [0, 9])
def test_filled_up_rows_give_the_same_loss_and_gradients(family: str, kept: int) -> None:
    plain, filled = (to_slice(batch(3, 5), 0, CPU, multiple) for multiple in (1, 16))
    assert plain.input_ids.shape != filled.input_ids.shape and plain.num_labels == filled.num_labels
    loss, gradients = result(family, plain, kept)
    other_loss, other_gradients = result(family, filled, kept)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        assert relative_error(other_gradients[name], gradient) < 1e-5, name


def test_batches_of_many_lengths_have_few_shapes() -> None:
    shapes = {
        tuple(len(t) for t in (part.input_ids, part.decoder_ids, part.labels))
        for seed in range(200)
        if (part := to_slice(batch(3, seed), 0, CPU, 32))
    }
    sources = {shape[0] for shape in shapes}
    assert all(size % 32 == 0 for shape in shapes for size in shape) and len(sources) <= 4


def test_the_row_of_padding_is_one_row_on_both_sides_that_no_label_judges() -> None:
    rows = [Row(np.arange(2, 10), np.arange(2, 7), 5), Row(np.arange(2, 10), np.arange(2, 9), 6)]
    part = to_slice(collate(rows, 0), 0, CPU, 4)
    assert part.source.lengths == (8, 8) and part.target.lengths == (5, 7), "nothing is missing: 16 and 12 tokens"
    part = to_slice(collate(rows, 0), 0, CPU, 16)
    assert part.source.lengths == (8, 8, 16) and part.target.lengths == (5, 7, 4)
    assert (part.labels[-4:] == IGNORED).all() and (part.input_ids[-16:] == 0).all() and part.num_labels == 12
    assert part.source.keys is not None and part.source.keys.tolist() == [5, 6, 0]
