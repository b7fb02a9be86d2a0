"""In backward or at the end: the same step; clipping to a global norm; gradients are freed; what is not finite is found and named."""

from __future__ import annotations

import pytest
import torch

from engine.blockwise import Blockwise
from engine.optimizer_in_backward import NotFinite, OptimizerInBackward, is_finite, norm_of
from engine.optimizers import OPTIMIZERS, Step
from engine.weights import WeightStore
from model.loss import LossSettings
from tests.engine.small_models import Rectangle, autograd_gradients, small_model

CUTS = [[0, 1], [2, 3]]


def one_step(max_grad_norm: float) -> dict[str, torch.Tensor]:
    model, batch = small_model(), Rectangle()
    update = OptimizerInBackward(OPTIMIZERS["adamw"](dict(model.named_parameters())), max_grad_norm)
    blockwise = Blockwise(model, 0, WeightStore(torch.float32), LossSettings(), 0.0)
    update.begin(Step(1, 0.01))
    assert not update.has_changed_weights
    blockwise.gradients(batch.micro_batches(model, CUTS), batch.num_labels, update)
    assert update.has_changed_weights == (max_grad_norm == 0)
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
    assert float(norm_of(gradients.values())) == pytest.approx(norm, rel=1e-5)
    seen: dict[str, torch.Tensor] = {}

    class Recorder(OPTIMIZERS["adamw"]):  # type: ignore[misc,valid-type]
        def update(self, weights, step, factor, finite) -> None:
            seen.update((self.names[id(weight)], weight.grad.clone()) for weight in weights)

    update = OptimizerInBackward(Recorder(dict(model.named_parameters())), norm / 4)
    update.begin(Step(1, 0.01))
    update.apply(list(model.parameters()))
    update.finish()
    assert all(torch.allclose(seen[name], gradients[name] / 4, rtol=1e-5, atol=1e-9) for name in gradients)


def test_frozen_weights_that_are_handed_over_change_nothing() -> None:
    """A step that fails after them is run again, without going back to a checkpoint."""
    model = small_model()
    update = OptimizerInBackward(OPTIMIZERS["adamw"](dict(model.named_parameters())))
    update.begin(Step(1, 0.01))
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


def test_a_loss_that_is_not_finite_breaks_off_before_any_update() -> None:
    model, batch = small_model(), Rectangle()
    blockwise = Blockwise(model, 0, WeightStore(torch.float32), LossSettings(), 0.0)
    update = OptimizerInBackward(OPTIMIZERS["adafactor"](dict(model.named_parameters())))
    with torch.no_grad():
        model.decoder.final_norm.weight[3] = float("inf")
    with pytest.raises(NotFinite):
        blockwise.gradients(batch.micro_batches(model, CUTS), batch.num_labels, update)
    assert not update.has_changed_weights


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_known_after_backward(max_grad_norm: float) -> None:
    model = small_model()
    update = OptimizerInBackward(OPTIMIZERS["adafactor"](dict(model.named_parameters())), max_grad_norm)
    for number, bad in ((1, 1.0), (2, float("nan")), (3, 1.0)):
        update.begin(Step(number, 0.01))
        before = model.embedding.detach().clone()
        for weight in model.parameters():
            weight.grad = torch.full_like(weight, 1e-3)
        model.embedding.grad[0, 0] = bad  # type: ignore[index]
        update.apply(list(model.encoder.parameters()))
        update.apply([model.embedding])
        update.finish()
        assert update.is_finite == (number != 2)
        if number == 2 and max_grad_norm:
            assert (
                torch.equal(model.embedding, before) and model.embedding.grad is None and not update.has_changed_weights
            )
            break  # without clipping the weights are lost by now
