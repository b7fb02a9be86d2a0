"""What resuming needs is all there, or the file that lacks it is named; nothing in it is run."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.tokenizers.training import byte_tokenizer
from engine.loss_scaling import LossScaling
from engine.optimizers import OPTIMIZERS, Optimizer, Step
from memory.estimate.workload import ExecutionPlan
from model.formats.answering import answers_by
from model.t5 import T5
from settings.declared import GenerateConfig
from settings.errors import UserError
from tests.training.small_trained import SHAPE
from training.checkpoints.content import load_optimizer, write_checkpoint
from training.checkpoints.state import TrainingState, read_training_state
from training.evaluation.stopping import BestMetric

CPU = torch.device("cpu")
STATE = TrainingState(
    step=3,
    tokens=100,
    best_eval_loss=2.5,
    choice=asdict(ExecutionPlan(2, 1, 1, 0, 2, "float32", "float32", 2**20)),
    loss_scaling=LossScaling().as_dict(),
    best_metric=BestMetric("loss", 0, 2.5, 3).state(),
    first_eval_loss=3.0,
)


def trained(name: str = "adafactor", dtype: torch.dtype = torch.float32) -> tuple[T5, Optimizer]:
    """A model after one update with drawn gradients."""
    model = T5(SHAPE, dtype=dtype).initialise(1)
    optimizer = OPTIMIZERS[name](dict(model.named_parameters()))
    draw = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=draw, dtype=torch.float32).to(weight.dtype)
        optimizer.update([weight], Step(1, 1e-3))
        weight.grad = None
    return model, optimizer


def write(folder: Path, model: T5, optimizer: Optimizer, state: TrainingState = STATE, **more: Any) -> None:
    write_checkpoint(folder, model, optimizer, byte_tokenizer(), state, **more)


def test_how_the_model_shall_answer_is_in_its_folder(tmp_path: Path) -> None:
    model, optimizer = trained("adafactor", torch.float32)
    (tmp_path / "c").mkdir()
    write(tmp_path / "c", model, optimizer, answers=GenerateConfig(num_beams=2, max_new_tokens=9))
    assert answers_by(tmp_path / "c") == ({"num_beams": 2, "max_new_tokens": 9}, [])


def saved(folder: Path, name: str = "adafactor", dtype: torch.dtype = torch.float32) -> Optimizer:
    model, optimizer = trained(name, dtype)
    folder.mkdir()
    write(folder, model, optimizer)
    return optimizer


def empty(name: str = "adafactor", dtype: torch.dtype = torch.float32) -> Optimizer:
    return OPTIMIZERS[name](dict(T5(SHAPE, dtype=dtype).named_parameters()))


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
    ("tokens", "many"),
    ("foreign", 1),
    ("choice.batch_size_per_gpu", True),
    ("choice.storage", "float99"),
    ("loss_scaling.scale", "load"),
    ("measured_on", {"content": "1"}),
    ("", "{"),
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


@pytest.mark.parametrize(("name", "dtype"), [("adafactor", torch.bfloat16), ("adamw_8bit", torch.float32)])
def test_a_missing_tensor_of_the_optimizer_is_noticed(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    saved(tmp_path / "c", name, dtype)
    load_optimizer(tmp_path / "c", empty(name, dtype))
    file = tmp_path / "c" / "state" / "optimizer.safetensors"
    tensors = load_file(file)
    for key in sorted(tensors)[::7]:
        save_file({other: tensor for other, tensor in tensors.items() if other != key}, file)
        with pytest.raises(UserError, match="lacks tensors") as caught:
            load_optimizer(tmp_path / "c", empty(name, dtype))
        assert key.rpartition("/")[0] in str(caught.value)


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_without_its_optimizer_state_is_refused_and_none_is_unpickled(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    path = tmp_path / "c" / "state" / "optimizer.safetensors"
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(UserError, match="cannot be read"):
        load_optimizer(tmp_path / "c", empty())
    assert not (tmp_path / "ran").exists()
    path.unlink()
    with pytest.raises(UserError, match="--finetune_from"):
        load_optimizer(tmp_path / "c", empty())


@pytest.mark.parametrize("name, step, is_whole", [("muon", 0, True), ("adamw", 3, False)])
def test_an_empty_state_is_whole_where_none_is_due(tmp_path: Path, name: str, step: int, is_whole: bool) -> None:
    """Before the first step no optimizer has any."""
    matrix = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = OPTIMIZERS[name]({"encoder.blocks.0.attention.q.adapter.a": matrix})
    model, _ = trained()
    (tmp_path / "c").mkdir()
    state = replace(STATE, step=step, loss_scaling=None)
    write(tmp_path / "c", model, optimizer, state)
    if is_whole:
        load_optimizer(tmp_path / "c", optimizer)
    else:
        with pytest.raises(UserError, match=r"lacks tensors .*: all of it"):
            load_optimizer(tmp_path / "c", optimizer)
