"""What does a checkpoint hold? A model folder that others can load, and beside it what resuming needs.

`state/` holds the optimizer's tensors and `training.json`: the step, the best loss, the choice of the plan. Data order,
masks, dropout and rounding are functions of (seed, step), so there is no generator state and no list of seen rows.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from data.tokenizer import Tokenizer
from engine.optimizers import Optimizer
from engine.scaling import LossScaling
from memory.work import Choice
from model import hf_format
from model.peft_format import save_adapters
from model.t5 import T5
from settings import UserError
from training.stopping import BestMetric


@dataclass
class TrainingState:
    """Where a run stands.

    Args:
        step: steps done. tokens: real tokens seen, both sides. best_eval_loss: None before the first evaluation.
        choice: the plan's choice, kept so that a resumed run computes in the same order.
        loss_scaling: see `engine.scaling`; None without fp16.
        best_metric: see `training.stopping`; None before the first evaluation.
        first_eval_loss: of the evaluation before the first step; None before that.
    """

    step: int = 0
    tokens: int = 0
    best_eval_loss: float | None = None
    choice: dict[str, Any] | None = None
    loss_scaling: dict[str, Any] | None = None
    best_metric: dict[str, Any] | None = None
    first_eval_loss: float | None = None


def write_checkpoint(folder: Path, model: T5, tokenizer: Tokenizer, optimizer: Optimizer, state: TrainingState) -> None:
    """Write everything into an empty folder; the caller makes it appear at once. Memory: a few MB of buffers.

    Of a model with adapters these alone are written, with the place and the fingerprint of their base.
    """
    if model.adapter_info is None:
        hf_format.save(model, folder)
    else:
        about = model.adapter_info
        save_adapters(model, about.settings, folder, about.base, about.fingerprint)
    tokenizer.save(folder)
    (folder / "state").mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in optimizer.state.items()},
        folder / "state" / "optimizer.safetensors",
    )
    (folder / "state" / "training.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf8")


def read_training_state(folder: Path) -> TrainingState:
    """Read where the run of this checkpoint stands.

    Raises:
        UserError: there is no state in the folder, or it is broken.
    """
    try:
        state = TrainingState(**json.loads((folder / "state" / "training.json").read_text(encoding="utf8")))
        fault = _fault(state)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        fault = str(error)
    if fault:
        raise UserError(
            f"checkpoint = {folder}, holds no state to resume from ({fault}); start again with --overwrite=True"
        )
    return state


def _fault(state: TrainingState) -> str:
    """What in a state cannot be gone on with; empty where nothing. TypeError: a choice that is none."""
    for name in ("step", "tokens"):
        if type(getattr(state, name)) is not int or getattr(state, name) < 0:
            return f"{name} is no whole number"
    for name in ("best_eval_loss", "first_eval_loss"):
        if getattr(state, name) is not None and type(getattr(state, name)) not in (int, float):
            return f"{name} is no number"
    if state.choice is not None:
        Choice(**state.choice)
    if state.loss_scaling is not None:
        LossScaling(**state.loss_scaling)
    return "" if state.best_metric is None else BestMetric.fault(state.best_metric)


def load_optimizer(folder: Path, optimizer: Optimizer, device: torch.device) -> None:
    """Load the optimizer's tensors of a checkpoint onto the device.

    Raises:
        UserError: they belong to another model or are broken.
    """
    path = folder / "state" / "optimizer.safetensors"
    try:
        optimizer.load_state(load_file(path, device=str(device)))
    except KeyError as error:
        raise UserError(
            f"checkpoint = {folder}, its optimizer state has {error}, which this model does not have"
        ) from None
    except Exception as error:  # safetensors raises its own class for a broken file
        raise UserError(f"checkpoint = {folder}, its optimizer state cannot be read: {error}") from None
