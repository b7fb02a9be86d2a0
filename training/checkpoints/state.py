"""How far a run is, as its checkpoint keeps it in `state/training.json`: the step, the best loss, how its steps are
done.

Data order, masks, dropout and rounding are functions of (seed, step), so there is no generator state and no list of
seen rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common.language import say
from common.storage import read_text
from devices.sizes import MALLOCS
from engine.loss_scaling import LossScaling
from memory.estimate.precision import COMPUTE_DTYPES, STORAGE_DTYPES
from memory.estimate.workload import WEIGHTS_IN, ExecutionPlan
from model.formats.checksums import STATE
from settings.errors import UserError
from training.evaluation.stopping import BestMetric, MeasuredOn

TRAINING_FILE = "training.json"
NAMES = {
    "storage": STORAGE_DTYPES,
    "compute": COMPUTE_DTYPES,
    "malloc": MALLOCS,
    "weights_in": WEIGHTS_IN,
}  # of a choice
# What states and choices say of fields that versions before did not have, so that their runs go on as they were.
STATE_BEFORE: dict[str, Any] = {}
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
        state: TrainingState = _filled(TrainingState, content, "it", STATE_BEFORE)
        if state.choice is not None:
            choice = _filled(ExecutionPlan, state.choice, "its choice", CHOICE_BEFORE)
            state = replace(state, choice=asdict(choice))
        for name, cls in (("loss_scaling", LossScaling), ("best_metric", BestMetric), ("measured_on", MeasuredOn)):
            if (part := getattr(state, name)) is not None:
                _filled(cls, part, f"its {name}")
        return state
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            "checkpoint = {folder}, holds no state to resume from: {path} cannot be used ({error}); copy it "
            "again, or start again with --overwrite=True",
            folder=folder,
            path=path,
            error=error,
        ) from None


def _filled(cls: type[Any], content: Any, what: str, before: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """An object of a dataclass from its fields in JSON: all of them, each of its type, and none besides.

    Args:
        before: the values of fields that an earlier version did not write.
    Raises:
        ValueError: it is something else.
    """
    if not isinstance(content, dict):
        raise ValueError(say("{what} is not an object", what=what))
    content = {**before, **content}
    types = {member.name: str(member.type) for member in fields(cls)}
    for name in types:
        if name not in content:
            raise ValueError(say("{what} lacks {name}", what=what, name=name))
    for name, value in content.items():
        if name not in types:
            raise ValueError(say("{what} has {name}, which no run writes", what=what, name=name))
        if not any(_is_of(value, kind, name) for kind in types[name].split(" | ")):
            raise ValueError(
                say("{name} of {what} is {value}, which no run writes", name=name, what=what, value=str(value)[:40])
            )
    return cls(**content)


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
