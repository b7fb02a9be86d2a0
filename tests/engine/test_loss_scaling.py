"""fp16 gradients against fp32 ones, whatever the size of activations; the scale moves."""

from __future__ import annotations

import pytest
import torch

from engine.loss_scaling import GOOD_STEPS, LossScaling
from engine.weights import weight_store_for
from model.t5 import T5
from settings.errors import UserError
from tests.engine.small_models import (
    Rectangle,
    blockwise_of,
    rectangle_gradients,
    reference_gradients,
    relative_error,
    small_model,
)

FIRST = "encoder.blocks.0.feed_forward.wi.weight"
FP32 = torch.float32
FP16 = torch.float16
FP16_STORE = weight_store_for(FP32, FP16)


def copied(model: T5, wo: float) -> T5:
    """The same weights, those of `wo` times a factor."""
    other = T5(model.config)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight.copy_(model.get_parameter(name) * (wo if name.endswith("wo.weight") else 1.0))
    return other


@pytest.mark.parametrize(("family", "saved", "wo"), [("umt5", 0, 1.0), ("t5", 99, 4e4)])
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
