"""What else would help: changes of one flag, each planned as if it were typed; and the words of a refusal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memory.estimate.peaks import peak_of, predict
from memory.estimate.precision import INT4
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from settings.declared import Config, T5ModelConfig, settings_by_name
from settings.errors import UserError
from settings.optimizers import OPTIMIZERS
from settings.precedence import model_presets
from support.language import join, say
from support.units import MIB, format_size

if TYPE_CHECKING:
    from memory.plan import Plan

LEAST_BUDGET = 256 * MIB  # The least that is proposed.
MOST_CHANGES = 2  # A refusal names so many changes beside a larger budget.
SIZES = ("small", "base", "large", "3b", "11b")  # A family of model presets has these sizes.


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
    candidates = list(changes(config, chosen.choice, chosen.effective_batch_size))
    half = chosen.peak_bytes // 2 // MIB
    if half * MIB >= LEAST_BUDGET:
        candidates.insert(0, (f"memory_budget={half}M", config.with_changes(memory_budget=half * MIB)))
    alternatives = list[Alternative]()
    for label, other in candidates:
        with suppress(UserError):  # It does not fit, or a setting that is asked for is not possible there.
            plan = plan_of(other)
            if chosen.peak_bytes - plan.peak_bytes > MIB:
                alternatives.append(Alternative.of(label, plan))
        if len(alternatives) == most:
            break
    return alternatives


def refusal(machine: Machine, work: Workload, least: ExecutionPlan, needs: Sequence[tuple[str, int]]) -> list[str]:
    """What is said where nothing fits: the phase, the batch, what is needed and what there is; then at most three
    changes.

    Args:
        least: the execution plan that needs the least.
        needs: changes of one flag, and the least bytes that any plan needs after each.
    """
    phases = predict(work, least, machine)
    phase, peak = peak_of(phases)
    parts = sorted(phases[phase].items(), key=lambda item: -item[1])[:4]
    rows = least.batch_size_per_gpu
    shapes = work.step_shapes
    if phase == "evaluation":
        rows = least.eval_batch_size_per_gpu
        shapes = work.evaluation_shapes
    sentence = say(
        "--memory_budget = {budget}, is too small for this run, which needs at least about {peak} ({parts}), in "
        "phase {phase} with a micro-batch of {rows} x {source} + {target} tokens; the program itself leaves "
        "{free} free",
        budget=format_size(machine.budget_bytes),
        peak=format_size(peak),
        phase=say(phase),
        rows=rows,
        parts=join(", ", [join(" ", [say(name), format_size(size)]) for name, size in parts]),
        source=shapes.longest_row.source,
        target=shapes.longest_row.target,
        free=format_size(max(0, machine.budget_bytes - machine.base_bytes)),
    )
    fitting = list[str]()
    helping = list[str]()
    for label, size in needs:
        if size <= machine.budget_bytes:
            fitting.append(say("--{flag} would fit, with about {peak}", flag=label, peak=format_size(size)))
    for label, size in sorted(needs, key=lambda need: need[1]):
        if machine.budget_bytes < size < peak - MIB:
            text = "--{flag} would need about {peak}: not enough by itself, but it helps most"
            helping.append(say(text, flag=label, peak=format_size(size)))
    enough = say("--memory_budget={enough}M would fit with all other settings unchanged", enough=math.ceil(peak / MIB))
    return [sentence, *[*fitting, *helping][:MOST_CHANGES], enough]


def changes(config: Config, choice: ExecutionPlan, rows: int) -> Iterator[tuple[str, Config]]:
    """Changes that may take less memory, what costs the user least first: the flag, and the settings with it. A resumed
    run keeps what defines it.

    Args:
        choice: the plan without them. rows: of its steps.
    """
    train = config.train
    adapts = config.lora.lora_rank > 0
    optimizer = OPTIMIZERS[train.optimizer]
    smaller = _smaller_preset(config.model_preset, config.model)
    candidates: list[tuple[bool, str, int | str]] = [
        (config.memory.memory_mode != "low", "memory_mode", "low"),
        (config.memory.memory_mode != "ultra", "memory_mode", "ultra"),
        (choice.batch_size_per_gpu > 1, "batch_size_per_gpu", 1),
        (choice.storage == "float32" and not adapts, "mixed_precision", "bf16"),
        (optimizer.weight_bytes + optimizer.matrix_bytes > 0 and not adapts, "optimizer", "adafactor"),
        (train.max_grad_norm > 0, "max_grad_norm", 0),
        (config.data.max_seq_len >= 16, "max_seq_len", config.data.max_seq_len // 2),
        (rows > 1, "effective_batch_size", rows // 2),
        (adapts and choice.storage != INT4, "lora_base", INT4),
        (train.is_finetune and train.finetune_from is not None and not adapts, "lora_rank", 8),
        (smaller != "" and not train.is_finetune and not train.is_keep_training, "model_preset", smaller),
    ]
    settings = settings_by_name()
    for is_possible, name, value in candidates:
        defines = name in settings and settings[name][1].metadata["defines"]
        if is_possible and not (defines and train.is_keep_training is True):
            change: dict[str, Any] = {name: value}
            yield f"{name}={value}", config.with_changes(**change)


def _smaller_preset(name: str, model: T5ModelConfig) -> str:
    """The next smaller model of the same family; empty for the smallest, and where fields of the shape were given."""
    presets = model_presets()
    family, _, size = name.rpartition("-")
    is_changed = any(vars(model)[field] != value for field, value in presets.get(name, {}).items())
    if is_changed or size not in SIZES[1:]:
        return ""
    smaller = f"{family}-{SIZES[SIZES.index(size) - 1]}"
    return smaller if smaller in presets else ""
