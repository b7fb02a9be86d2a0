"""What else would help: changes of one flag, each planned as if it were typed; and the words of a refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from language import join, say
from memory.estimate.peaks import peak_of, predict
from memory.estimate.precision import INT4
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from memory.step_work import effective_batch
from optimizers import OPTIMIZERS
from settings.declared import Config, settings_by_name
from settings.errors import UserError
from settings.precedence import model_presets
from units import MIB, format_size

if TYPE_CHECKING:
    from memory.plan import Plan

LEAST_BUDGET = 256 * MIB  # The least that is proposed.
MOST_CHANGES = 2  # A refusal names so many changes beside a larger budget.
SIZES = ("small", "base", "large", "3b", "11b")  # A family of model presets has these sizes.
Change = tuple[str, int | str]  # Name of a setting, and its new value.


@dataclass(frozen=True)
class Alternative:
    """What a change of one flag gives.

    Args:
        label: the flag.
        batch_size_per_gpu, saved_blocks: of the plan after the change.
        peak_bytes: predicted.
        seconds: of a step, predicted.
        fits: whether the budget holds it.
    """

    label: str
    batch_size_per_gpu: int
    saved_blocks: int
    peak_bytes: int
    seconds: float
    fits: bool = True

    @classmethod
    def of(cls, label: str, plan: Plan) -> Alternative:
        """A plan in figures."""
        choice = plan.choice
        return cls(label, choice.batch_size_per_gpu, choice.saved_blocks, plan.peak_bytes, plan.seconds)


def what_else(config: Config, chosen: Plan, plan_of: Callable[[Config], Plan], most: int) -> list[Alternative]:
    """Changes of one flag after which the plan takes less, at most so many.

    Args:
        chosen: the plan that they are compared with.
        plan_of: makes the plan of other settings.
    """
    alternatives = list[Alternative]()
    half = chosen.peak_bytes // 2 // MIB * MIB
    changes = _changes(config, chosen.choice, chosen.effective_batch_size)
    for change in [("memory_budget", half), *changes] if half >= LEAST_BUDGET else changes:
        with suppress(UserError):  # It does not fit, or a setting that is asked for is not possible there.
            other = plan_of(_changed(config, change))
            if chosen.peak_bytes - other.peak_bytes > MIB:
                alternatives.append(Alternative.of(_label(change), other))
        if len(alternatives) == most:
            break
    return alternatives


def refusal(
    config: Config, machine: Machine, work: Workload, least: ExecutionPlan, least_peak: Callable[[Config], int]
) -> list[str]:
    """What is said where nothing fits: the phase, the batch, what is needed and what there is; then at most three
    changes.

    Args:
        least: the execution plan that needs the least.
        least_peak: the least bytes that any plan of other settings needs.
    """
    phases = predict(work, least, machine)
    phase, peak = peak_of(phases)
    parts = sorted(phases[phase].items(), key=lambda item: -item[1])[:4]
    is_evaluation = phase == "evaluation"
    longest = (work.evaluation_shapes if is_evaluation else work.step_shapes).longest_row
    sentence = say(
        "--memory_budget = {budget}, is too small for this run, which needs at least about {peak} ({parts}), in "
        "phase {phase} with a micro-batch of {rows} x {source} + {target} tokens; the program itself leaves "
        "{free} free",
        budget=format_size(machine.budget_bytes),
        peak=format_size(peak),
        phase=say(phase),
        rows=least.eval_batch_size_per_gpu if is_evaluation else least.batch_size_per_gpu,
        parts=join(", ", [join(" ", [say(name), format_size(size)]) for name, size in parts]),
        source=longest.source,
        target=longest.target,
        free=format_size(max(0, machine.budget_bytes - machine.base_bytes)),
    )
    fitting = list[str]()
    helping = list[tuple[int, str]]()
    for change in _changes(config, least, effective_batch(config, machine)):
        less = least_peak(_changed(config, change))
        words = {"flag": _label(change), "peak": format_size(less)}
        if less <= machine.budget_bytes:
            fitting.append(say("--{flag} would fit, with about {peak}", **words))
        elif peak - less > MIB:
            text = say("--{flag} would need about {peak}: not enough by itself, but it helps most", **words)
            helping.append((less, text))
    changes = [*fitting, *(text for _, text in sorted(helping))]
    enough = say("--memory_budget={enough}M would fit with all other settings unchanged", enough=math.ceil(peak / MIB))
    return [sentence, *changes[:MOST_CHANGES], enough]


def _changed(config: Config, change: Change) -> Config:
    name, value = change
    if name == "model_preset":
        return replace(config.changed(**model_presets()[str(value)]), model_preset=str(value))
    return config.changed(**{name: value})


def _label(change: Change) -> str:
    name, value = change
    return f"{name}={int(value) // MIB}M" if name == "memory_budget" else f"{name}={value}"


def _changes(config: Config, choice: ExecutionPlan, rows: int) -> list[Change]:
    """Changes that may take less memory, what costs the user least first; a resumed run keeps what defines it."""
    train = config.train
    adapts = bool(config.lora.lora_rank)
    optimizer = OPTIMIZERS[train.optimizer]
    has_base = train.is_finetune and train.finetune_from is not None
    smaller = None if train.is_finetune else _smaller_preset(config)
    changes: list[tuple[bool, str, int | str]] = [
        (config.memory.memory_mode != "low", "memory_mode", "low"),
        (config.memory.memory_mode != "ultra", "memory_mode", "ultra"),
        (choice.batch_size_per_gpu > 1, "batch_size_per_gpu", 1),
        (choice.storage == "float32" and not adapts, "mixed_precision", "bf16"),
        (optimizer.weight_bytes + optimizer.matrix_bytes > 0 and not adapts, "optimizer", "adafactor"),
        (train.max_grad_norm > 0, "max_grad_norm", 0),
        (config.data.max_seq_len >= 16, "max_seq_len", config.data.max_seq_len // 2),
        (rows > 1, "effective_batch_size", rows // 2),
        (adapts and choice.storage != INT4, "lora_base", INT4),
        (has_base and not adapts, "lora_rank", 8),
        (smaller is not None and not train.is_keep_training, "model_preset", smaller or ""),
    ]
    settings = settings_by_name()
    return [
        (name, value)
        for is_possible, name, value in changes
        if is_possible and not (train.is_keep_training is True and settings[name][1].metadata["defines"])
    ]


def _smaller_preset(config: Config) -> str | None:
    """The next smaller model of the same family; None for the smallest, and where fields of the shape were given."""
    presets = model_presets()
    family, _, size = config.model_preset.rpartition("-")
    is_changed = any(vars(config.model)[name] != value for name, value in presets.get(config.model_preset, {}).items())
    if is_changed or size not in SIZES[1:]:
        return None
    name = f"{family}-{SIZES[SIZES.index(size) - 1]}"
    return name if name in presets else None
