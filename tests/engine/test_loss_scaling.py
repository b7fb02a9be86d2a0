"""fp16 gradients against fp32 ones, whatever the size of activations; a step that overflows is left out, and the scale
moves.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from devices.base import CUDA, HOST, DeviceTraits, override_traits
from engine.loss_scaling import GOOD_STEPS, LossScaling
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.weights import weight_store_for
from model.t5 import T5
from settings.errors import UserError
from tests.engine.small_models import (
    CUTS,
    Rectangle,
    blockwise_of,
    rectangle_gradients,
    reference_gradients,
    relative_error,
    small_model,
)

FIRST = "encoder.blocks.0.feed_forward.wi.weight"
FP32 = torch.float32
BF16 = torch.bfloat16
FP16 = torch.float16
FP16_STORE = weight_store_for(FP32, FP16)


def copied(model: T5, dtype: torch.dtype = FP32, wo: float = 1.0) -> T5:
    """The same weights, those of `wo` times a factor."""
    other = T5(model.config, dtype=dtype)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight.copy_(model.get_parameter(name) * (wo if name.endswith("wo.weight") else 1.0))
    return other


@pytest.mark.parametrize(("family", "saved", "wo"), [("umt5", 0, 1.0), ("t5", 99, 4e4), ("t5-v1.1", 2, 4e4)])
def test_gradients_are_those_of_fp32_times_the_scale(family: str, saved: int, wo: float) -> None:
    # With seeds 1 and 2 one ReLU lies so near zero that fp16 switches it, which all weights before it feel.
    model = copied(small_model(family, seed=3), wo=wo)
    _, expected = reference_gradients(model, Rectangle())
    largest = []
    for block in model.decoder.blocks:
        block.feed_forward.register_forward_hook(
            lambda module, inputs, output: largest.append(float(output.detach().abs().max()))
        )
    blockwise = blockwise_of(model, saved, FP16_STORE, scaling=LossScaling(scale=2.0**16))
    _, gradients = rectangle_gradients(blockwise, Rectangle())
    assert wo == 1.0 or max(largest) > 7e4, "beyond fp16's range"
    assert all(weight.dtype == FP32 for weight in model.parameters()), "the fp16 copy must not stay"
    assert gradients.keys() == expected.keys() and gradients[FIRST].dtype == FP16
    for name, gradient in expected.items():
        assert relative_error(gradients[name].float() / 2**16, gradient) < 5e-2, name


def updating(
    model: T5, name: str = "adamw", scaling: LossScaling | None = None, clip: float = 0.0
) -> OptimizerInBackward:
    return OptimizerInBackward(OPTIMIZERS[name](dict(model.named_parameters())), clip, scaling)


def step(model: T5, update: OptimizerInBackward, batch: Rectangle, number: int) -> float:
    update.begin(Step(number, 0.01))
    storage = model.embedding.dtype
    store = weight_store_for(storage, FP16 if update.scaling else storage)
    blockwise = blockwise_of(model, 0, store, scaling=update.scaling)
    micro_batches = batch.micro_batches(model, CUTS["two"])
    loss, _ = update.finish(blockwise.gradients(micro_batches, batch.num_labels, update))
    assert all(weight.grad is None for weight in model.parameters())
    return loss


@pytest.mark.parametrize(("name", "clip"), [("adamw", 0.0), ("adafactor", 0.05)])
def test_a_step_is_that_of_fp32(name: str, clip: float) -> None:
    before = small_model()
    model = small_model()
    plain = small_model()
    step(plain, updating(plain, name, None, clip), Rectangle(), 1)
    step(model, updating(model, name, LossScaling(scale=1024.0), clip), Rectangle(), 1)
    for weight in ("embedding", FIRST):
        start = before.get_parameter(weight)
        moved = model.get_parameter(weight) - start
        expected = plain.get_parameter(weight) - start
        # A first step is little more than the signs of the gradient: some elements near zero go the other way.
        assert relative_error(moved, expected) < 0.2


def test_it_learns_as_bf16_does_also_where_activations_leave_its_range() -> None:
    losses = []
    for scaling in (None, LossScaling()):
        model = copied(small_model("t5-v1.1", d_ff=64, num_layers=1, num_decoder_layers=1), BF16, 4e4)
        update = updating(model, "adafactor", scaling)
        losses.append([step(model, update, Rectangle(4, 16, 8), number) for number in range(1, 21)])
    assert losses[1][-1] < 0.5 * losses[1][0]
    assert sum(losses[1]) == pytest.approx(sum(losses[0]), rel=0.05)


@pytest.mark.parametrize("traits", [HOST, CUDA])
def test_one_block_that_overflows_leaves_out_the_whole_step(traits: DeviceTraits) -> None:
    with override_traits("cpu", replace(traits, is_fused=False)):
        model = small_model()
        update = updating(model, "adafactor", LossScaling(2.0**10))
        spoiled = model.encoder.blocks[1]
        spoiled.register_full_backward_pre_hook(lambda module, grads: tuple(grad * torch.inf for grad in grads))
        step(model, update, Rectangle(), 1)
    before = small_model()
    assert all(torch.equal(weight, before.get_parameter(name)) for name, weight in model.named_parameters())
    assert not any(state.any() for state in update.optimizer.state.values())


def test_the_scale_doubles_after_many_good_steps_and_goes_on_from_a_checkpoint() -> None:
    scaling = LossScaling(8.0, GOOD_STEPS - 2, 5)
    scaling.count(is_finite=True)
    resumed = LossScaling(**scaling.as_dict())
    assert resumed == LossScaling(8.0, GOOD_STEPS - 1, 5)
    resumed.count(is_finite=True)
    assert resumed == LossScaling(16.0, 0, 5)
    resumed.count(is_finite=False)
    assert resumed == LossScaling(8.0, 0, 6)


def test_says_so_where_no_scale_helps() -> None:
    scaling = LossScaling(2.0)
    scaling.count(is_finite=False)
    with pytest.raises(UserError, match=r"mixed_precision = fp16.*bf16"):
        scaling.count(is_finite=False)
