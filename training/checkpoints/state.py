"""What does a checkpoint hold? A model folder that others can load, and beside it what resuming needs.

`state/` holds the optimizer's tensors and `training.json`: the step, the best loss, the choice of the plan. Data order,
masks, dropout and rounding are functions of (seed, step), so there is no generator state and no list of seen rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from config import GenerateConfig
from data.tokenizers.tokenizer import Tokenizer
from engine.optimizers import Optimizer
from engine.scaling import LossScaling
from limits import MALLOCS
from memory.cost.precision import COMPUTE_DTYPES, REST_DTYPES
from memory.cost.work import HOMES, JSON_NAMES, Choice
from model import hf_format
from model.decoding.passing import WithWeights, in_place
from model.formats.answering import keep_answers
from model.formats.checksums import STATE
from model.formats.peft import save_adapters
from model.formats.tensor_files import write_safetensors
from model.t5 import T5
from settings.errors import UserError
from storage import read_text
from training.evaluation.stopping import BestMetric, MeasuredOn

TRAINING_FILE, OPTIMIZER_FILE = "training.json", "optimizer.safetensors"
# fields with a default that came later: a checkpoint of before lacks them, and means that default
LATER_FIELDS: tuple[str, ...] = (
    "divergence", "best_evaluation", "source_sizes", "target_sizes", "kernels", "weights_in", "away_blocks", "measured_on",
    "asked",
)  # fmt: skip
NO_NAMES: Mapping[str, str] = {}
GREEDY = GenerateConfig()
NAMES = {
    "storage": REST_DTYPES,
    "compute": COMPUTE_DTYPES,
    "malloc": MALLOCS,
    "weights_in": HOMES,
}  # of a choice


@dataclass(frozen=True)
class TrainingState:
    """How far a run is.

    Args:
        step: steps done. tokens: real tokens seen, both sides. best_eval_loss: None before the first evaluation.
        choice: the plan's choice, kept so that a resumed run computes in the same order. asked: the settings of the step that it
            was made for, see `memory.choices.step_settings`; None: a checkpoint of before.
        loss_scaling: see `engine.scaling`; None without fp16.
        best_metric: see `training.evaluation.stopping`; None before the first evaluation.
        first_eval_loss: of the evaluation before the first step; None before that.
        divergence: see `training.divergence`; None: every number was finite so far.
        best_evaluation: step and numbers of the best one, for the model's card where the log is lost; of the last one, as long as
            none is better than that of step 0.
        measured_on: rows of the best numbers, see `training.evaluation.stopping`; None: that was not kept.
    """

    step: int = 0
    tokens: int = 0
    best_eval_loss: float | None = None
    choice: dict[str, Any] | None = None
    loss_scaling: dict[str, Any] | None = None
    best_metric: dict[str, Any] | None = None
    first_eval_loss: float | None = None
    divergence: dict[str, Any] | None = None
    best_evaluation: dict[str, Any] | None = None
    measured_on: dict[str, Any] | None = None
    asked: dict[str, Any] | None = None


def write_checkpoint(
    folder: Path,
    model: T5,
    tokenizer: Tokenizer,
    optimizer: Optimizer,
    state: TrainingState,
    held: WithWeights = in_place,
    answers: GenerateConfig = GREEDY,
) -> None:
    """Write everything into an empty folder; the caller makes it appear at once. Memory: a few MB of buffers.

    Of a model with adapters these alone are written, with the place and the fingerprint of their base.

    Args:
        held: a context in which a weight is in memory, where some rest elsewhere.
        answers: how the model shall answer, see `model.formats.answering`.
    """
    about = model.adapter_info
    if about is None:
        hf_format.save(model, folder, held=held)
    else:
        save_adapters(model, about.settings, folder, about.base, about.fingerprint)
    keep_answers(folder, answers)
    tokenizer.save(folder)
    (folder / STATE).mkdir()
    write_safetensors(optimizer.state, folder / STATE / OPTIMIZER_FILE)
    (folder / STATE / TRAINING_FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf8")


def read_training_state(folder: Path) -> TrainingState:
    """Read how far the run of this checkpoint is.

    Raises:
        UserError: there is no state in the folder, or it lacks something or holds what no run writes.
    """
    path = folder / STATE / TRAINING_FILE
    try:
        content = json.loads(read_text(path))
        state: TrainingState = _filled(TrainingState, content, "it")
        if state.choice is not None:
            choice = _filled(Choice, state.choice, "its choice", JSON_NAMES)
            state = replace(state, choice=choice.as_dict())
        if state.loss_scaling is not None:
            _filled(LossScaling, state.loss_scaling, "its loss_scaling")
        if state.best_metric is not None:
            _filled(BestMetric, state.best_metric, "its best_metric")
        if state.measured_on is not None:
            _filled(MeasuredOn, state.measured_on, "its measured_on")
        return state
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"checkpoint = {folder}, holds no state to resume from: {path} cannot be used ({error}); copy it again, or "
            "start again with --overwrite=True"
        ) from None


def _filled(cls: type[Any], content: Any, what: str, json_names: Mapping[str, str] = NO_NAMES) -> Any:
    """An object of a dataclass from its fields in JSON: all of them, none besides, each of its type.

    Args:
        json_names: field -> its name in JSON, where that is another.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{what} is no object")
    names = {json_names.get(member.name, member.name): member.name for member in fields(cls)}
    types = {json_names.get(member.name, member.name): str(member.type) for member in fields(cls)}
    if missing := [name for name in types if name not in content and name not in LATER_FIELDS]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    if foreign := [name for name in content if name not in types]:
        raise ValueError(f"{what} has {', '.join(foreign)}, which no run writes")
    for name, value in content.items():
        if not any(_is_of(value, kind, name) for kind in types[name].split(" | ")):
            raise ValueError(f"{name} of {what} is {str(value)[:40]}, which no run writes")
    return cls(**{names[name]: value for name, value in content.items()})


def _is_of(value: Any, kind: str, name: str) -> bool:
    if name in NAMES:
        return value in NAMES[name]
    if kind == "int":
        return type(value) is int and value >= 0
    if kind == "float":
        return type(value) in (int, float)
    if kind == "tuple[int, ...]":
        return isinstance(value, (list, tuple)) and all(type(each) is int and each > 0 for each in value)
    known = {"None": type(None), "bool": bool, "str": str, "dict[str, Any]": dict}
    return type(value) is known[kind]


def load_optimizer(folder: Path, optimizer: Optimizer, device: torch.device) -> None:
    """Load the optimizer's tensors of a checkpoint onto the device.

    Raises:
        UserError: they belong to another model, are broken, or not all there.
    """
    take_state(folder, optimizer, lambda: load_file(folder / STATE / OPTIMIZER_FILE, device=str(device)))


def take_state(folder: Path, optimizer: Optimizer, read: Callable[[], dict[str, Tensor]]) -> None:
    """Give an optimizer the tensors of a checkpoint, all that it needs.

    Raises:
        UserError: they belong to another model, are broken, or not all there.
    """
    try:
        state = read()
        optimizer.load_state(state)
    except KeyError as error:
        raise UserError(
            f"checkpoint = {folder}, its optimizer state has {error}, which this model does not have"
        ) from None
    except Exception as error:  # safetensors raises its own class for a broken file
        raise UserError(f"checkpoint = {folder}, its optimizer state cannot be read: {error}") from None
    missing = optimizer.incomplete() if state else []
    if not state and any(
        optimizer.state_bytes(tuple(weight.shape), name) for name, weight in optimizer.weights.items()
    ):
        trained = read_training_state(folder)  # with a loss scale, every step so far may have been left out
        missing = ["all of it"] if trained.step and trained.loss_scaling is None else []
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise UserError(
            f"checkpoint = {folder}, its optimizer state lacks tensors or has them in another form: {shown}; copy the "
            "checkpoint again, or continue from its weights alone with --finetune_from"
        )
