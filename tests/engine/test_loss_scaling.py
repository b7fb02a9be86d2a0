"""fp16 gradients against fp32 ones; a step that overflows is left out, as if it had never been."""

from __future__ import annotations

import pytest
import torch

from engine.blockwise import Blockwise
from engine.loss_scaling import GOOD_STEPS, LossScaling
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.weights import weight_store_for
from model.loss import LossSettings
from model.t5 import T5
from settings.errors import UserError
from tests.engine.small_models import Rectangle, autograd_gradients, relative_error, small_model

CUTS = [[0, 3], [1, 2]]
FIRST = "encoder.blocks.0.feed_forward.wi.weight"


def fp16_walk(model: T5, scaling: LossScaling | None, saved: int = 0) -> Blockwise:
    weight_store = weight_store_for(torch.float32, torch.float16)
    return Blockwise(model, saved, weight_store, LossSettings(), 0.0, scaling=scaling)


def gradients(model: T5, batch: Rectangle, scaling: LossScaling | None, saved: int = 0) -> dict[str, torch.Tensor]:
    blockwise = fp16_walk(model, scaling, saved)
    blockwise.gradients(batch.micro_batches(model, CUTS), batch.num_labels)
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    for weight in model.parameters():
        assert weight.dtype == torch.float32, "the wide copy must not stay"
        weight.grad = None
    return found


@pytest.mark.parametrize(("family", "saved"), [("t5", 0), ("umt5", 99)])
def test_gradients_are_those_of_fp32_times_the_scale(family: str, saved: int) -> None:
    # of seed 1 and 2 one ReLU lies so near zero that fp16 switches it, which all weights before it feel
    model, batch = small_model(family, seed=3), Rectangle()
    _, expected = autograd_gradients(model, batch)
    found = gradients(model, batch, LossScaling(scale=256.0), saved)
    assert found.keys() == expected.keys()
    matrices = [name for name in found if found[name].dtype == torch.float16]
    assert "embedding" in matrices and not any("norm" in name for name in matrices)
    for name, gradient in expected.items():
        assert relative_error(found[name] / 256.0, gradient) < 5e-2, name


def step(model: T5, update: OptimizerInBackward, batch: Rectangle, number: int) -> None:
    update.begin(Step(number, 0.01))
    fp16_walk(model, update.scaling).gradients(batch.micro_batches(model, CUTS), batch.num_labels, update)
    assert not update.has_begun, "whether the step counts is known after the walk alone"
    update.finish()
    assert all(weight.grad is None for weight in model.parameters())


def weights_of(model: T5) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize(("optimizer", "max_grad_norm"), [("adamw", 0.0), ("adafactor", 0.05)])
def test_a_step_is_that_of_fp32(optimizer: str, max_grad_norm: float) -> None:
    batch, reference, model = Rectangle(), small_model(), small_model()
    _, expected = autograd_gradients(reference, batch)
    plain = OptimizerInBackward(OPTIMIZERS[optimizer](dict(reference.named_parameters())), max_grad_norm)
    seen: dict[str, torch.Tensor] = {}

    class Recorder(OPTIMIZERS[optimizer]):  # type: ignore[misc]
        def update(self, weights, step) -> None:
            seen.update((self.names[id(weight)], weight.grad.clone()) for weight in weights)
            super().update(weights, step)

    norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    clip = min(1.0, max_grad_norm / norm) if max_grad_norm else 1.0
    assert clip < 1.0 or not max_grad_norm
    for name, weight in reference.named_parameters():
        weight.grad = expected[name].clone()
    plain.begin(Step(1, 0.01))
    plain.apply(list(reference.parameters()))
    plain.finish()
    before = weights_of(model)
    step(
        model,
        OptimizerInBackward(Recorder(dict(model.named_parameters())), max_grad_norm, LossScaling(scale=1024.0)),
        batch,
        1,
    )
    assert all(gradient.dtype == torch.float32 for gradient in seen.values())
    assert max(relative_error(gradient, clip * expected[name]) for name, gradient in seen.items()) < 5e-2
    moved, wanted = weights_of(model), weights_of(reference)
    # a first step is little more than the signs of the gradient, so that some elements near zero go the other way
    assert max(relative_error(moved[n] - before[n], wanted[n] - before[n]) for n in ("embedding", FIRST)) < 0.2


def test_an_overflow_leaves_the_step_out_and_halves_the_scale() -> None:
    model, batch = small_model(), Rectangle()
    scaling = LossScaling(scale=2.0**28)
    update = OptimizerInBackward(OPTIMIZERS["adamw"](dict(model.named_parameters())), 0.0, scaling)
    before = weights_of(model)
    step(model, update, batch, 1)
    assert update.is_skipped and not update.has_begun and not update.optimizer.state
    assert scaling == LossScaling(2.0**27, 0, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    for number in range(2, 40):
        step(model, update, batch, number)
        if not update.is_skipped:
            break
    assert scaling.scale < 2.0**27 and scaling.good_steps == 1 and scaling.skipped_steps == number - 1
    other = small_model()
    first = OptimizerInBackward(OPTIMIZERS["adamw"](dict(other.named_parameters())), 0.0, LossScaling(scaling.scale))
    step(other, first, batch, 1)
    after, same = weights_of(model), weights_of(other)
    assert all(torch.equal(after[name], same[name]) for name in after), "skipped steps must leave no trace"


def test_doubles_after_many_good_steps_and_goes_on_from_a_checkpoint() -> None:
    scaling = LossScaling(8.0, GOOD_STEPS - 2, 5)
    assert scaling.admits(True)
    resumed = LossScaling(**scaling.as_dict())
    assert resumed == LossScaling(8.0, GOOD_STEPS - 1, 5)
    assert resumed.admits(True) and resumed == LossScaling(16.0, 0, 5)
    assert not resumed.admits(False) and resumed == LossScaling(8.0, 0, 6)


def test_says_so_where_no_scale_helps() -> None:
    scaling = LossScaling(2.0)
    assert not scaling.admits(False)
    with pytest.raises(UserError, match=r"mixed_precision = fp16.*bf16"):
        scaling.admits(False)
