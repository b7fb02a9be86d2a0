"""How far a run is, as its checkpoint keeps it in `state/training.json`: the step, the best loss, how its steps are
done.

Data order, masks, dropout and rounding are functions of (seed, step), so there is no generator state and no list of
seen rows.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from devices.sizes import MALLOCS
from engine.loss_scaling import LossScaling
from memory.estimate.precision import COMPUTE_DTYPES, STORAGE_DTYPES
from memory.estimate.workload import WEIGHTS_IN, ExecutionPlan
from model.formats.checksums import STATE
from settings.errors import UserError
from support.language import say
from support.storage import read_text
from training.evaluation.stopping import BestMetric, MeasuredOn

TRAINING_FILE = "training.json"
CHOICE_NAMES = {
    "storage": STORAGE_DTYPES,
    "compute": COMPUTE_DTYPES,
    "malloc": MALLOCS,
    "weights_in": WEIGHTS_IN,
}
# What a choice says of fields that versions before did not have, so that their runs go on as they were:
CHOICE_BEFORE: dict[str, Any] = {"compiled": False}


@dataclass(frozen=True)
class TrainingState:
    """How far a run is.

    Args:
        step: steps done. tokens: real tokens seen, both sides. best_eval_loss: None before the first evaluation.
        choice: the plan's choice, kept so that a resumed run computes in the same order; None where a run begins.
        asked: the settings of the step that it was made for, see `memory.step_settings.StepSettings.of_cut`; likewise.
        loss_scaling: see `engine.loss_scaling`; None without fp16.
        best_metric: see `training.evaluation.stopping`; None before the first evaluation.
        first_eval_loss: of the evaluation before the first step; None before that.
        divergence: see `training.divergence`; None: every number was finite so far.
        best_evaluation: step and numbers of the best one, for the model's card where the log is lost; of the last one,
            as long as none is better than that of step 0.
        measured_on: rows of the best numbers, see `training.evaluation.stopping`; None where a run begins.
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


def read_training_state(folder: Path) -> TrainingState:
    """Read how far the run of this checkpoint is.

    Raises:
        UserError: there is no state in the folder, or it lacks something or holds what no run writes.
    """
    path = folder / STATE / TRAINING_FILE
    try:
        content = json.loads(read_text(path))
        state: TrainingState = _read_object(TrainingState, content, "it")
        if state.choice is not None:
            choice = _read_object(ExecutionPlan, {**CHOICE_BEFORE, **state.choice}, "its choice")
            state = replace(state, choice=asdict(choice))
        for name, cls in {"loss_scaling": LossScaling, "best_metric": BestMetric, "measured_on": MeasuredOn}.items():
            part = getattr(state, name)
            if part is not None:
                _read_object(cls, part, f"its {name}")
        return state
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            "checkpoint = {folder}, holds no state to resume from: {path} cannot be used ({error}); copy it "
            "again, or start again with --overwrite=True",
            folder=folder,
            path=path,
            error=error,
        ) from None


def _read_object(cls: type[Any], content: Any, what: str) -> Any:
    """An object of a dataclass from its fields in JSON: all of them, each of its type, and none besides.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(content, dict):
        raise ValueError(say("{what} is not an object", what=what))
    types = {member.name: str(member.type) for member in fields(cls)}
    for name in types:
        if name not in content:
            raise ValueError(say("{what} lacks {name}", what=what, name=name))
    for name, value in content.items():
        if name not in types:
            raise ValueError(say("{what} has {name}, which no run writes", what=what, name=name))
        if not _is_valid(value, types[name], name):
            text = "{name} of {what} is {value}, which no run writes"
            raise ValueError(say(text, name=name, what=what, value=str(value)[:40]))
    return cls(**content)


def _is_valid(value: Any, annotation: str, name: str) -> bool:
    if name in CHOICE_NAMES:
        return value in CHOICE_NAMES[name]
    if annotation == "tuple[int, ...]":
        return isinstance(value, (list, tuple)) and all(type(each) is int and each > 0 for each in value)
    words = annotation.split(" | ")
    if type(value) is int:
        return value >= 0 and not {"int", "float"}.isdisjoint(words)
    names = {type(None): "None", bool: "bool", float: "float", str: "str", dict: "dict[str, Any]"}
    return names.get(type(value)) in words
