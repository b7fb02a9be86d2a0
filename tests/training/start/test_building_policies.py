"""The walk gets the policies that the plan says: a loss scale for fp16, and where checkpointed activations wait; it follows a changed plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from config import load
from devices.cpu import CpuDevice
from engine.offload import Offload
from engine.optimizers import Step
from engine.scaling import LossScaling
from memory.cost.prediction import Choice
from tests.engine.small_models import FAMILIES, Rectangle
from training.checkpoints.state import TrainingState
from training.start.building import build

CHOICE = Choice(4, 1, 1, 0, 4, "float32", "float32", 2**20)
SHAPE = {
    "vocab_size": 61, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
}  # fmt: skip


def begin(state: TrainingState | None = None, **flags: Any) -> Any:
    config = load("train", {"train_file": "x", **SHAPE, **flags})
    return SimpleNamespace(config=config, base=None, is_resumed=False, state=state or TrainingState())


def test_fp16_has_a_loss_scale_that_a_checkpoint_keeps() -> None:
    choice = replace(CHOICE, compute="float16")
    engine = build(begin(), choice, CpuDevice())
    assert engine.walk.scaling is engine.update.scaling is not None, "what multiplies is what divides"
    assert engine.model.embedding.dtype == torch.float32 and engine.loss_scaling == LossScaling().as_dict()
    engine.update.scaling.admits(False)
    state = TrainingState(3, loss_scaling=engine.loss_scaling)
    resumed = build(begin(state), choice, CpuDevice())
    assert resumed.update.scaling == LossScaling(2.0**15, 0, 1)
    assert build(begin(), CHOICE, CpuDevice()).loss_scaling is None


@pytest.mark.parametrize("family", ["t5-v1.1"])
def test_a_few_steps_in_fp16_learn_as_in_fp32(family: str) -> None:
    losses = []
    for compute in ("float32", "float16"):
        engine = build(begin(optimizer="adamw_rms", **FAMILIES[family]), replace(CHOICE, compute=compute), CpuDevice())
        batch = Rectangle()
        micro_batches = batch.micro_batches(engine.model, [[0, 1], [2, 3]])
        for number in range(1, 16):
            engine.update.begin(Step(number, 0.02))
            loss = engine.walk.gradients(micro_batches, batch.num_labels, engine.update.ready)
            engine.update.finish()
        losses.append(float(loss) / batch.num_labels)
    assert losses[1] == pytest.approx(losses[0], rel=0.05) and losses[1] < 3.0


def test_offload_follows_the_plan() -> None:
    engine = build(begin(), replace(CHOICE, offload_boundaries=True), CpuDevice())
    away = engine.walk.policies.checkpointed
    assert isinstance(away, Offload)
    engine.follow(replace(CHOICE, offload_boundaries=True, saved_blocks=2))
    assert engine.walk.policies.checkpointed is away, "its slabs are not taken twice"
    engine.follow(CHOICE)
    assert not isinstance(engine.walk.policies.checkpointed, Offload)
