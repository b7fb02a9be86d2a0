"""What is not finite is found: in a loss before backward, in a gradient after the walk; and the block is named."""

from __future__ import annotations

import pytest
import torch

from engine.anomaly import Anomalies
from engine.checkpointing import Checkpointing
from engine.finite import NotFinite, StepChecks, is_finite, norm_of
from engine.optimizers import OPTIMIZERS, Step
from engine.update import Update
from engine.walk import Walk
from engine.weights import WeightStore
from model.loss import LossSettings
from model.t5 import T5
from tests.engine.small_models import Rectangle, small_model

CUTS = [[0, 1], [2, 3]]


def walk_of(model: T5, saved: int, detect_anomaly: bool) -> tuple[Walk, StepChecks]:
    checks = Anomalies(model) if detect_anomaly else StepChecks()
    store = WeightStore(torch.float32)
    return Walk(model, Checkpointing(saved), store, LossSettings(), 0.0, check_loss=checks.loss), checks


def test_norms_are_those_of_the_whole(compiled: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(30, 7, generator=generator), torch.randn(5, generator=generator), torch.tensor(2.0)]
    whole = torch.cat([tensor.flatten() for tensor in tensors]).norm()
    assert torch.allclose(norm_of(tensors), whole)
    assert torch.allclose(norm_of([tensor.bfloat16() for tensor in tensors]), whole, rtol=1e-2)
    assert is_finite(tensors) and not is_finite([*tensors, torch.tensor([1.0, float("nan")])])


def test_a_loss_that_is_not_finite_breaks_off_before_any_update() -> None:
    model, batch = small_model(), Rectangle()
    walk, _ = walk_of(model, 0, False)
    with torch.no_grad():
        model.decoder.final_norm.weight[3] = float("inf")
    handed: list[object] = []
    with pytest.raises(NotFinite):
        walk.gradients(batch.micro_batches(model, CUTS), batch.num_labels, handed.append)
    assert not handed


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_told_behind_the_walk(max_grad_norm: float) -> None:
    model = small_model()
    update = Update(OPTIMIZERS["adafactor"](dict(model.named_parameters())), max_grad_norm)
    for number, bad in ((1, 1.0), (2, float("nan")), (3, 1.0)):
        update.begin(Step(number, 0.01))
        before = model.embedding.detach().clone()
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, 1e-3)
        model.embedding.grad[0, 0] = bad  # type: ignore[index]
        update.ready(list(model.encoder.parameters()))
        update.ready([model.embedding])
        update.finish()
        assert update.is_finite == (number != 2)
        if number == 2 and max_grad_norm:
            assert torch.equal(model.embedding, before) and model.embedding.grad is None and not update.has_begun
            break  # without clipping the weights are lost by now


@pytest.mark.parametrize("saved", [0])
def test_the_block_of_the_first_bad_number_backward_is_named(saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from model import layers

    model, batch = small_model(), Rectangle()
    walk, checks = walk_of(model, saved, True)
    bad, plain = model.decoder.blocks[1].attention.q.weight, layers.product_back
    monkeypatch.setattr(layers, "product_back", lambda grad, w: plain(grad, w) * (float("nan") if w is bad else 1.0))
    walk.gradients(batch.micro_batches(model, CUTS), batch.num_labels, checks.watching(lambda weights: None))
    assert checks.first == "decoder block 2 of 3, backward"
