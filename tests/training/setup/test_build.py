"""The parts of a step follow the settings and the plan: what learns, how fast, dtypes, a loss scale, where activations
wait.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import devices
from engine.loss_scaling import LossScaling
from engine.step import Engine
from engine.weights import QuantizedWeightStore, WeightStore
from memory.estimate.workload import ExecutionPlan
from model import hf_format
from model.lora.adapter import adapters_of
from model.quantization import is_int8
from model.t5 import T5
from settings.errors import UserError
from tests.training.setup.test_adapters import SHAPE, make_adapter, run_config
from training.checkpoints.state import TrainingState
from training.setup.build import build
from training.setup.resolved import Beginning


def built(base: Path | None, storage: str = "float32", **flags: object) -> Engine:
    return build(begun(base, **flags), ExecutionPlan(1, 1, 1, 0, 1, storage, "float32", 2**20))


def begun(base: Path | None = None, state: TrainingState | None = None, **flags: object) -> Beginning:
    return Beginning(config=run_config(**flags), device=devices.pick("cpu"), base=base, state=state or TrainingState())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    hf_format.save(T5(SHAPE).initialise(1), tmp_path / "base")
    return tmp_path / "base"


def test_only_what_learns_has_an_optimizer() -> None:
    engine = built(None, freeze="encoder,embedding", optimizer="adafactor")
    assert all(name.startswith("decoder.") for name in engine.update.optimizer.weights)
    assert built(None).update.optimizer.weights.keys() == dict(T5(SHAPE).named_parameters()).keys()


@pytest.mark.parametrize(("storage", "weight_store"), [("float32", WeightStore), ("int4", QuantizedWeightStore)])
def test_adapters_over_a_base_as_it_lies(base: Path, storage: str, weight_store: type) -> None:
    engine = built(base, storage, lora_rank=2)
    assert type(engine.blockwise.weight_store) is weight_store
    assert is_int8(engine.model.embedding) == (storage in ("int8", "int4"))
    assert len(adapters_of(engine.model)) == 2 * (1 + 2 * 2)
    assert all(".adapter." in name for name in engine.update.optimizer.weights)
    assert all(weight.dtype == torch.float32 for weight in engine.update.optimizer.weights.values())


def test_adapters_go_on_over_their_base_alone(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "adapter", 1)
    engine = built(folder, lora_rank=2)
    assert engine.model.adapter_info is not None and engine.model.adapter_info.base == str(base.resolve())
    assert any(adapter.b.abs().sum() > 0 for adapter in adapters_of(engine.model).values())
    hf_format.save(T5(SHAPE).initialise(2), base)
    with pytest.raises(UserError, match="is for another base"):
        built(folder, lora_rank=2)


CHOICE = ExecutionPlan(4, 1, 1, 0, 4, "float32", "float32", 2**20)


def test_fp16_has_a_loss_scale_that_a_checkpoint_keeps() -> None:
    choice = replace(CHOICE, compute="float16")
    engine = build(begun(), choice)
    assert engine.blockwise.scaling is engine.update.scaling is not None, "what multiplies is what divides"
    assert engine.model.embedding.dtype == torch.float32 and engine.update.scaling == LossScaling()
    engine.update.scaling.count(is_finite=False)
    state = TrainingState(3, loss_scaling=engine.update.scaling.as_dict())
    resumed = build(begun(state=state), choice)
    assert resumed.update.scaling == LossScaling(2.0**15, 0, 1)
    assert build(begun(), CHOICE).update.scaling is None
