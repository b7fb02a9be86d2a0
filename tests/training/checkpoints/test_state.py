"""What resuming needs is all there, or the file that lacks it is named."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.tokenizers.training import byte_tokenizer
from engine.loss_scaling import LossScaling
from engine.optimizers import OPTIMIZERS, Optimizer, Step
from memory.estimate.workload import ExecutionPlan
from model import hf_format
from model.t5 import T5
from settings.errors import UserError
from tests.training.small_trained import SHAPE
from training.checkpoints.content import load_optimizer, write_checkpoint
from training.checkpoints.state import TrainingState, read_training_state
from training.evaluation.stopping import BestMetric

STATE = TrainingState(
    step=3,
    tokens=100,
    best_eval_loss=2.5,
    choice=asdict(ExecutionPlan(2, 1, 1, 0, 2, "float32", "float32", 2**20)),
    loss_scaling=LossScaling().as_dict(),
    best_metric=BestMetric("loss", 0, 2.5, 3).state(),
    first_eval_loss=3.0,
)


def saved(folder: Path) -> None:
    """Write a model after one update with drawn gradients."""
    model = T5(SHAPE).initialise(1)
    optimizer = OPTIMIZERS["adamw_8bit"](dict(model.named_parameters()))
    draw = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.update([weight], Step(1, 1e-3))
        weight.grad = None
    folder.mkdir()
    write_checkpoint(folder, model, optimizer, byte_tokenizer(), STATE)


def empty() -> Optimizer:
    return OPTIMIZERS["adamw_8bit"](dict(T5(SHAPE).named_parameters()))


def test_a_state_that_an_earlier_version_has_written_is_read_as_it_was_meant(tmp_path: Path) -> None:
    """A field that is added since has its value in STATE_BEFORE or CHOICE_BEFORE, or a user's run cannot go on."""
    recorded = Path(__file__).with_name("recorded_training.json").read_text()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "training.json").write_text(recorded)
    content = json.loads(recorded)
    state = asdict(read_training_state(tmp_path))
    choice = state.pop("choice")
    choice_before = content.pop("choice")
    assert choice.pop("compiled") is False, "no version before compiled blocks"
    assert json.loads(json.dumps(choice)) == choice_before
    assert state == content


WRONG: list[tuple[str, Any]] = [
    ("step", None),
    ("foreign", 1),
    ("choice.storage", "float99"),
    ("", "[" * 100_000),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_field_that_is_missing_or_foreign_is_told(tmp_path: Path, field: str, value: Any) -> None:
    saved(tmp_path / "c")
    file = tmp_path / "c" / "state" / "training.json"
    assert read_training_state(tmp_path / "c") == STATE
    content = json.loads(file.read_text())
    *outer, name = field.split(".")
    inner = content[outer[0]] if outer else content
    inner[name] = value
    if value is None:
        del inner[name]
    file.write_text(json.dumps(content) if field else value)
    with pytest.raises(UserError) as caught:
        read_training_state(tmp_path / "c")
    assert "training.json" in str(caught.value) and name in str(caught.value)


def test_a_missing_tensor_of_the_optimizer_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    load_optimizer(tmp_path / "c", empty())
    assert hf_format.load(tmp_path / "c").config == SHAPE, "the model is beside it"
    file = tmp_path / "c" / "state" / "optimizer.safetensors"
    tensors = load_file(file)
    for key in sorted(tensors)[::7]:
        save_file({other: tensor for other, tensor in tensors.items() if other != key}, file)
        with pytest.raises(UserError, match="lacks tensors") as caught:
            load_optimizer(tmp_path / "c", empty())
        assert key.rpartition("/")[0] in str(caught.value)
    file.write_bytes(b"no safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        load_optimizer(tmp_path / "c", empty())
    file.unlink()
    with pytest.raises(UserError, match="--finetune_from"):
        load_optimizer(tmp_path / "c", empty())
