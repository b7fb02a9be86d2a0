"""Clipping to a global norm."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from tests.engine.small_models import Rectangle, autograd_gradients, small_model


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
    _, measured_norm = update.finish(torch.zeros(()))
    assert measured_norm == pytest.approx(norm, rel=1e-5)
    assert applied.keys() == gradients.keys()
    for name, expected in gradients.items():
        torch.testing.assert_close(applied[name], expected / 4, rtol=1e-5, atol=1e-9)
