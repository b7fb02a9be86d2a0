"""What else would help: changes of one flag, each planned as it would be if it were typed; and the words of a refusal.

A change is told only where it takes less memory; the one that costs the user least comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from language import join, say
from memory.batch_size import effective_batch, evaluation_batch
from memory.candidates import make_work
from memory.estimate.peaks import peak_of, predict
from memory.estimate.precision import INT4, precisions
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from optimizers import OPTIMIZERS
from settings.declared import Config, settings_by_name
from settings.errors import DoesNotFit
from units import MIB, format_size

if TYPE_CHECKING:
    from memory.plan import Plan

LEAST_BUDGET = 256 * MIB  # that is proposed
Value = int | str
Change = tuple[str, Value]  # name of a setting, and its new value


@dataclass(frozen=True)
class Alternative:
    """What a change of one flag gives.

    Args:
        label: the flag. batch_size_per_gpu, saved_blocks: of the plan by then.
        peak_bytes: predicted. seconds: of a step, predicted. fits: whether the budget holds it.
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
        chosen: the plan that they are compared with. plan_of: makes the plan of other settings.
    """
    found = list[Alternative]()
    for name, value in _ideas(config, chosen.choice, chosen.effective_batch_size, chosen.peak_bytes):
        with suppress(DoesNotFit):
            other = plan_of(config.changed(**{name: value}))
            if chosen.peak_bytes - other.peak_bytes > MIB:
                found.append(Alternative.of(_label(name, value), other))
        if len(found) == most:
            break
    return found


def refusal(config: Config, work: Workload, machine: Machine, least: ExecutionPlan) -> list[str]:
    """What is said where nothing fits: the phase, the batch, what is needed and what there is; then at most three changes.

    Args:
        least: the execution plan that needs the least.
    """
    phases = predict(work, least, machine)
    phase, peak = peak_of(phases)
    parts = sorted(phases[phase].items(), key=lambda item: -item[1])[:4]
    rows = least.eval_batch_size_per_gpu if phase == "evaluation" else least.batch_size_per_gpu
    longest = (work.evaluation_shapes if phase == "evaluation" else work.step_shapes).longest_row
    free = max(0, machine.budget_bytes - machine.base_bytes)
    told = say(
        "--memory_budget = {budget}, is too small for this run, which needs at least about {peak} ({parts}), in "
        "phase {phase} with a micro-batch of {rows} x {source} + {target} tokens; the program itself leaves "
        "{free} free",
        budget=format_size(machine.budget_bytes), peak=format_size(peak), phase=say(phase), rows=rows,
        parts=join(", ", [join(" ", [say(name), format_size(size)]) for name, size in parts]),
        source=longest.source, target=longest.target, free=format_size(free),
    )  # fmt: skip
    found = list[tuple[bool, int, str]]()
    for place, (name, value) in enumerate(_ideas(config, least, effective_batch(config, machine), 0)):
        less = _peak_after((name, value), config, work, machine, least)
        if peak - less > MIB:  # those that fit, the cheapest first; then the smallest
            fits = less <= machine.budget_bytes
            helps = "--{flag} would fit, with about {peak}"
            if not fits:
                helps = "--{flag} would need about {peak}: not enough by itself, but it helps most"
            sentence = say(helps, flag=_label(name, value), peak=format_size(less))
            found.append((not fits, place if fits else less, sentence))
    changes = [sentence for *_, sentence in sorted(found, key=lambda change: change[:2])[:2]]
    return [
        told,
        *changes,
        say("--memory_budget={enough}M would fit with all other settings unchanged", enough=math.ceil(peak / MIB)),
    ]


def cut(work: Workload, choice: ExecutionPlan, rows: int) -> ExecutionPlan:
    """The choice with micro-batches of other rows or other work; as many rows as before pass through a block together."""
    together = count = work.step_shapes.count(rows)
    if choice.accumulation_passes > 1:
        together = min(count, max(1, choice.batch_size_per_gpu * choice.micro_batches_per_pass // rows))
    source, target = work.step_shapes.sizes(rows)
    return replace(
        choice, batch_size_per_gpu=rows, micro_batches_per_pass=together, accumulation_passes=math.ceil(count / together),
        source_sizes=source, target_sizes=target,
    )  # fmt: skip


def _label(name: str, value: Value) -> str:
    return f"{name}={int(value) // MIB}M" if name == "memory_budget" else f"{name}={value}"


def _ideas(config: Config, choice: ExecutionPlan, rows: int, peak_bytes: int) -> Iterator[Change]:
    """Changes that may take less memory, what costs the user least first; a run that goes on keeps what defines it."""
    goes_on = config.train.is_keep_training is True
    for name, value in _all_ideas(config, choice, rows, peak_bytes):
        if not (goes_on and settings_by_name()[name][1].metadata["defines"]):
            yield name, value


def _all_ideas(config: Config, choice: ExecutionPlan, rows: int, peak_bytes: int) -> Iterator[Change]:
    train, adapts = config.train, bool(config.lora.lora_rank)
    if (half := peak_bytes // 2 // MIB * MIB) >= LEAST_BUDGET:
        yield "memory_budget", half
    for mode in ("low", "ultra"):
        if config.memory.memory_mode != mode:
            yield "memory_mode", mode
    if choice.batch_size_per_gpu > 1:
        yield "batch_size_per_gpu", 1
    if choice.storage == "float32" and not adapts:
        yield "mixed_precision", "bf16"
    facts = OPTIMIZERS[train.optimizer]
    if (facts.weight_bytes or facts.matrix_bytes) and not adapts:
        yield "optimizer", "adafactor"
    if train.max_grad_norm > 0:
        yield "max_grad_norm", 0
    if config.data.max_seq_len >= 16:
        yield "max_seq_len", config.data.max_seq_len // 2
    if rows > 1:
        yield "effective_batch_size", rows // 2
    if adapts and choice.storage != INT4:
        yield "lora_base", INT4
    if not adapts and train.is_finetune and train.finetune_from is not None:  # there is a base for adapters to go over
        yield "lora_rank", 8


def _peak_after(change: Change, config: Config, work: Workload, machine: Machine, least: ExecutionPlan) -> int:
    """What the smallest execution plan takes after a change, without planning all anew."""
    name, value = change
    changed, shapes, evaluation = config.changed(**{name: value}), work.shapes, work.evaluation
    source, target = work.source_tokens, work.target_tokens
    if name == "max_seq_len":
        source, shapes, evaluation = min(source, int(value)), None, None
        target = min(target, make_work(changed, machine, int(value), None).target_tokens)
    if name == "effective_batch_size":
        shapes = None
    other = replace(make_work(changed, machine, source, target), shapes=shapes, evaluation=evaluation)
    choice, rows = least, min(least.batch_size_per_gpu, other.rows)
    if name == "batch_size_per_gpu":
        rows = int(value)
        choice = replace(choice, eval_batch_size_per_gpu=evaluation_batch(changed, machine, rows))
    if name in ("batch_size_per_gpu", "memory_mode"):
        choice = replace(choice, saved_blocks=0, malloc="small")
    if name in ("mixed_precision", "lora_base", "memory_mode"):
        smallest = precisions(changed, machine.multiplies_fast)[-1]
        choice = replace(choice, storage=smallest.storage, compute=smallest.compute)
    return peak_of(predict(other, cut(other, choice, rows), machine))[1]
