"""At once or together: the same step; clipping to a global norm; gradients are freed."""

from __future__ import annotations

import pytest
import torch

from engine.checkpointing import Checkpointing
from engine.optimizers import OPTIMIZERS, Step
from engine.sharing.reduce import Reducer
from engine.update import Update, global_norm
from engine.walk import Walk
from engine.weights import WeightStore
from model.loss import LossSettings
from tests.engine.small_models import Rectangle, autograd_gradients, small_model


def one_step(max_grad_norm: float) -> dict[str, torch.Tensor]:
    model, batch = small_model(), Rectangle()
    update = Update(OPTIMIZERS["adamw"](dict(model.named_parameters())), max_grad_norm)
    walk = Walk(model, Checkpointing(0), WeightStore(torch.float32), LossSettings(), 0.0)
    reducer = Reducer(update.ready, num_processes=1)
    update.begin(Step(1, 0.01))
    assert not update.has_begun
    walk.gradients(batch.micro_batches(model, [[0, 1], [2, 3]]), batch.num_labels, reducer.ready)
    assert update.has_begun == (max_grad_norm == 0)
    reducer.finish()
    update.finish()
    assert all(weight.grad is None for weight in model.parameters())
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_holding_all_gradients_changes_nothing_where_nothing_is_clipped() -> None:
    at_once, together = one_step(0.0), one_step(1e9)
    assert all(torch.equal(at_once[name], together[name]) for name in at_once)
    assert any(not torch.equal(at_once[name], weight) for name, weight in small_model().named_parameters())


def test_clips_to_the_global_norm() -> None:
    model, batch = small_model(), Rectangle()
    _, gradients = autograd_gradients(model, batch)
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    for name, weight in model.named_parameters():
        weight.grad = gradients[name].clone()
    assert global_norm(list(model.parameters())) == pytest.approx(norm, rel=1e-5)
    seen: dict[str, torch.Tensor] = {}

    class Recorder(OPTIMIZERS["adamw"]):  # type: ignore[misc,valid-type]
        def update(self, weights, step) -> None:
            seen.update((self.names[id(weight)], weight.grad.clone()) for weight in weights)

    update = Update(Recorder(dict(model.named_parameters())), norm / 4)
    update.begin(Step(1, 0.01))
    update.ready(list(model.parameters()))
    update.finish()
    assert all(torch.allclose(seen[name], gradients[name] / 4, rtol=1e-5, atol=1e-9) for name in gradients)


def test_frozen_weights_that_are_handed_over_change_nothing() -> None:
    """A step that fails after them is run again, without going back to a checkpoint."""
    model = small_model()
    update = Update(OPTIMIZERS["adamw"](dict(model.named_parameters())))
    update.begin(Step(1, 0.01))
    update.ready([model.decoder.final_norm.weight])
    assert not update.has_begun
    model.embedding.grad = torch.ones_like(model.embedding)
    update.ready([model.embedding])
    assert update.has_begun
