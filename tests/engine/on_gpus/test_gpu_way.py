"""The way of a GPU, on the CPU: the same gradients, weights and losses as the CPU's own way, summed in another
order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from data.batches.collate import Row, collate
from devices.base import CUDA, HOST, MPS, DeviceTraits, override_traits
from devices.cpu import CpuDevice
from engine.blockwise import Objective
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.step import Engine, NotFinite
from memory.estimate.workload import ExecutionPlan
from model.loss import LossSettings
from model.t5 import T5
from tests.engine.small_models import (
    Rectangle,
    Spoiled,
    assert_near,
    blockwise_of,
    rectangle_gradients,
    relative_error,
    small_model,
)

CUDA = replace(CUDA, has_fused_attention=False)  # A CPU has none of its kernels.
GPUS = {"cuda": CUDA, "mps": MPS}


@pytest.mark.parametrize(
    ("family", "gpu", "saved", "rate"), [("t5", "cuda", 0, 0.3), ("t5-v1.1", "mps", 99, 0.3), ("umt5", "cuda", 2, 0.0)]
)
def test_a_pass_gives_the_gradients_of_the_cpu(family: str, gpu: str, saved: int, rate: float) -> None:
    with override_traits("cpu", GPUS[gpu]):  # Its q, k and v lie below each other.
        model = small_model(family)
    blockwise = blockwise_of(model, saved, rate=rate, loss=LossSettings(61 * 4 * 16, 0.1))
    results = []
    scores = 2000  # Which weights of attention are dropped follows from how they are cut: it is the same for both.
    for traits in (replace(HOST, score_elements=scores), replace(GPUS[gpu], score_elements=scores, max_inner_size=40)):
        with override_traits("cpu", traits):
            results.append(rectangle_gradients(blockwise, Rectangle(), "four"))
    assert_near(results[1], results[0], 2e-5)


@pytest.mark.parametrize(
    ("gpu", "dtype", "name"),
    [
        ("cuda", torch.bfloat16, "adamw_8bit"),
        ("cuda", torch.bfloat16, "muon"),
        ("mps", torch.float32, "adafactor"),
    ],
)
def test_updates_are_those_of_the_cpu(gpu: str, dtype: torch.dtype, name: str) -> None:
    def run(traits: DeviceTraits) -> list[torch.Tensor]:
        model = T5(small_model().config, dtype=dtype).initialise(0)
        generator = torch.Generator().manual_seed(0)
        optimizer = OPTIMIZERS[name](dict(model.named_parameters()))
        update = OptimizerInBackward(optimizer)
        groups = [list(model.encoder.parameters()), list(model.decoder.parameters()), [model.embedding]]
        with override_traits("cpu", traits):
            for number in range(1, 4):
                update.begin(Step(number, 0.01, 0.1, seed=3))
                for group in groups:
                    for weight in group:
                        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
                    update.apply(group)
                update.finish(torch.zeros(()))
                assert all(weight.grad is None for weight in model.parameters())
        assert not optimizer.incomplete()
        return [weight.detach().clone() for weight in model.parameters()]

    small = replace(GPUS[gpu], update_elements=3000)
    # Where a sum differs in its last place, a rounding may go the other way.
    most = 1e-5 if dtype == torch.float32 else 2e-3
    for ours, expected in zip(run(small), run(HOST), strict=True):
        assert relative_error(ours, expected) < most


DRAW = np.random.default_rng(0)


ROWS = [Row(DRAW.integers(2, 61, 9 + index), DRAW.integers(2, 61, 5), index) for index in range(4)]


BATCH = collate(ROWS, 0)


def engine_of(max_grad_norm: float, objective: Objective | None = None) -> Engine:
    model = small_model()
    plan = ExecutionPlan(4, 1, 1, 99, 4, "float32", "float32", 1 << 20)
    update = OptimizerInBackward(OPTIMIZERS["adafactor"](dict(model.named_parameters())), max_grad_norm)
    return Engine(blockwise_of(model, 99, objective=objective), update, CpuDevice(), plan)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3])
def test_steps_have_the_losses_of_the_cpu(max_grad_norm: float) -> None:
    losses = []
    for traits in (HOST, CUDA):
        with override_traits("cpu", traits):
            engine = engine_of(max_grad_norm)
            losses.append([engine.step(Step(number, 0.01), [BATCH], BATCH.num_labels).loss for number in range(1, 4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0][2] < losses[0][0]


@pytest.mark.parametrize("spoiled", [Spoiled(loss=torch.nan), Spoiled(gradient=torch.nan)])
def test_clipped_gradients_are_looked_at_before_any_is_applied(spoiled: Spoiled) -> None:
    with override_traits("cpu", CUDA):
        engine = engine_of(1.0, spoiled)
        outcome = engine.step(Step(1, 0.01), [BATCH], BATCH.num_labels)
    assert outcome == NotFinite(has_changed_weights=False)
    before = small_model()
    for name, weight in engine.model.named_parameters():
        assert weight.grad is None and torch.equal(weight, before.get_parameter(name))
