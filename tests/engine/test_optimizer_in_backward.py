"""In backward or at the end: the same step; clipping to a global norm; gradients are freed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from engine.optimizer_in_backward import OptimizerInBackward, is_finite, norm_of
from engine.optimizers import OPTIMIZERS, Step
from model.t5 import T5
from tests.engine.small_models import CUTS, Rectangle, autograd_gradients, blockwise_of, small_model

NO_LOSS = torch.zeros(())


def updating(model: T5, max_grad_norm: float = 0.0) -> OptimizerInBackward:
    update = OptimizerInBackward(OPTIMIZERS["adamw"](dict(model.named_parameters())), max_grad_norm)
    update.begin(Step(1, 0.01))
    return update


def one_step(max_grad_norm: float) -> dict[str, Tensor]:
    model = small_model()
    update = updating(model, max_grad_norm)
    assert not update.has_changed_weights
    loss = blockwise_of(model).gradients(Rectangle().micro_batches(model, CUTS["two"]), 20, update)
    assert update.has_changed_weights == (max_grad_norm == 0)
    update.finish(loss)
    assert all(weight.grad is None for weight in model.parameters())
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_holding_all_gradients_changes_nothing_where_nothing_is_clipped() -> None:
    at_once = one_step(0.0)
    together = one_step(1e9)
    assert all(torch.equal(at_once[name], together[name]) for name in at_once)
    assert any(not torch.equal(at_once[name], weight) for name, weight in small_model().named_parameters())


def test_clips_to_the_global_norm() -> None:
    model = small_model()
    _, gradients = autograd_gradients(model, Rectangle())
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    for name, weight in model.named_parameters():
        weight.grad = gradients[name].clone()
    applied: dict[str, Tensor] = {}

    class Recorder(OPTIMIZERS["adamw"]):  # type: ignore[misc,valid-type]
        def update(self, weights: Sequence[nn.Parameter], step: Step, factor: float = 1.0) -> None:
            for weight in weights:
                assert weight.grad is not None
                applied[self.names[id(weight)]] = weight.grad * factor

    update = OptimizerInBackward(Recorder(dict(model.named_parameters())), norm / 4)
    update.begin(Step(1, 0.01))
    update.apply(list(model.parameters()))
    assert not applied
    _, measured_norm = update.finish(NO_LOSS)
    assert measured_norm == pytest.approx(norm, rel=1e-5)
    assert applied.keys() == gradients.keys()
    for name, expected in gradients.items():
        torch.testing.assert_close(applied[name], expected / 4, rtol=1e-5, atol=1e-9)


def test_frozen_weights_that_are_handed_over_change_nothing() -> None:
    """A step that fails after them is run again, without going back to a checkpoint."""
    model = small_model()
    update = updating(model)
    update.apply([model.decoder.final_norm.weight])
    assert not update.has_changed_weights
    model.embedding.grad = torch.ones_like(model.embedding)
    update.apply([model.embedding])
    assert update.has_changed_weights


def test_norms_are_those_of_the_whole(compiled: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(30, 7, generator=generator), torch.randn(5, generator=generator), torch.tensor(2.0)]
    whole = torch.cat([tensor.flatten() for tensor in tensors]).norm()
    assert torch.allclose(norm_of(tensors), whole)
    assert torch.allclose(norm_of([tensor.bfloat16() for tensor in tensors]), whole, rtol=1e-2)
    assert is_finite(tensors) and not is_finite([*tensors, torch.tensor([1.0, float("nan")])])
