"""What else could be done? Other ways to run the same step, changes of one flag that take less memory, and a refusal.

Each is priced like the plan itself: a way that is shown to fit does fit, a change that is shown to save does save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from config import PREFERENCES, Config, settings_by_name
from language import join, say
from memory.estimate.peaks import peak_of, predict
from memory.estimate.precision import INT4, QUANTIZED
from memory.estimate.time import typical_seconds
from memory.estimate.workload import JSON_NAMES, ExecutionPlan, Machine, Workload, trained_counts
from optimizers import OPTIMIZERS
from settings.fields import AUTO
from units import MIB, format_size

COST = {  # of a change, in what the user gives up: the cheapest is told first
    "memory_mode=ultra": 0, "mixed_precision=bf16": 1, "optimizer=adafactor": 2, "max_grad_norm=0": 2, "batch_size_per_gpu=1": 1,
    "max_seq_len": 3, "effective_batch_size": 3, "lora_base": 4, "lora_rank=8": 5,
}  # fmt: skip


@dataclass(frozen=True)
class Alternative:
    """One way to run the step, or one change of a flag.

    Args:
        label: words for it; of a change, the flag. batch_size_per_gpu, saved_blocks: of the way to run.
        peak_bytes: predicted. seconds: of a step, predicted. fits: whether the budget holds it.
    """

    label: str
    batch_size_per_gpu: int
    saved_blocks: int
    peak_bytes: int
    seconds: float
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {JSON_NAMES.get(name, name): value for name, value in asdict(self).items()}


def other_ways(work: Workload, machine: Machine, choice: ExecutionPlan) -> list[Alternative]:
    """The planned way first, then ways that differ from it in one thing, the fastest first."""
    blocks, rows = work.model.num_layers + work.model.num_decoder_layers, choice.batch_size_per_gpu
    ways = [
        *(("saved blocks", replace(choice, saved_blocks=saved)) for saved in (0, blocks // 2, blocks)),
        *(
            ("micro-batch", _cut(work, choice, count))
            for count in sorted({1, max(1, rows // 2), min(work.rows, 2 * rows)})
        ),
        *(("malloc", replace(choice, malloc=malloc)) for malloc in ("fast", "small")),
    ]
    if choice.compute == "float32" and choice.storage not in QUANTIZED:
        if choice.storage == "float32":
            ways.append(("bfloat16 at rest", replace(choice, storage="bfloat16")))
        else:
            ways.append(("float32 at rest", replace(choice, storage="float32")))
    found = {way: _priced(label, work, way, machine) for label, way in reversed(ways) if way != choice}
    planned = _priced("planned", work, choice, machine)
    return [planned, *sorted(found.values(), key=lambda one: one.seconds)]


def _cut(work: Workload, choice: ExecutionPlan, rows: int) -> ExecutionPlan:
    """The choice with other micro-batches; as many rows as before pass through a block together."""
    together = count = work.step_shapes.count(rows)
    if choice.accumulation_passes > 1:
        together = min(count, max(1, choice.batch_size_per_gpu * choice.micro_batches_per_pass // rows))
    passes = math.ceil(count / together)
    return _with_sizes(
        work, replace(choice, batch_size_per_gpu=rows, micro_batches_per_pass=together, accumulation_passes=passes)
    )


def _with_sizes(work: Workload, choice: ExecutionPlan) -> ExecutionPlan:
    """The choice, its micro-batches filled up to what suits this work."""
    source, target = work.step_shapes.sizes(choice.batch_size_per_gpu)
    return replace(choice, source_sizes=source, target_sizes=target)


def _priced(label: str, work: Workload, choice: ExecutionPlan, machine: Machine) -> Alternative:
    peak = peak_of(predict(work, choice, machine))[1]
    seconds = typical_seconds(work, choice, machine.as_measured())
    fits = peak <= machine.budget_bytes
    return Alternative(label, choice.batch_size_per_gpu, choice.saved_blocks, peak, seconds, fits)


def cheapest_changes(
    config: Config, work: Workload, machine: Machine, choice: ExecutionPlan, most: int
) -> list[Alternative]:
    """Changes of one flag after which the run takes less, the one that costs the user least first.

    Args:
        choice: the way to run that they are compared with. most: how many.
    Returns:
        those that fit, cheapest first, and then those that do not, the smallest first.
    """
    peak = peak_of(predict(work, choice, machine))[1]
    ideas = [idea for idea in _ideas(config, work, choice) if may_change(config, idea[0].partition("=")[0])]
    priced = [_priced(flag, changed, _with_sizes(changed, way), machine) for flag, way, changed in ideas]
    helpful = [change for change in priced if peak - change.peak_bytes > MIB]

    def order(change: Alternative) -> tuple[bool, int, int]:
        cost = COST[change.label if change.label in COST else change.label.partition("=")[0]]
        return not change.fits, cost if change.fits else change.peak_bytes, change.peak_bytes

    return sorted(helpful, key=order)[:most]


def may_change(config: Config, name: str) -> bool:
    """Whether a flag can help: a run that goes on keeps what defines it."""
    return config.train.is_keep_training is not True or not settings_by_name()[name][1].metadata["defines"]


def adapts_a_base(config: Config) -> bool:
    """Whether there is a model for adapters to go over, as far as the settings tell."""
    return config.train.is_finetune and config.train.finetune_from is not None


def _ideas(config: Config, work: Workload, choice: ExecutionPlan) -> Iterator[tuple[str, ExecutionPlan, Workload]]:
    one = replace(_cut(work, choice, 1), eval_batch_size_per_gpu=1, saved_blocks=0, malloc="small")
    yield "batch_size_per_gpu=1", one, work
    if config.memory.memory_mode != "ultra":
        yield "memory_mode=ultra", replace(choice, saved_blocks=0, malloc="small"), work
    if choice.storage == "float32" and not config.lora.lora_rank:
        yield "mixed_precision=bf16", replace(choice, storage="bfloat16"), work
    if config.lora.lora_rank and choice.storage != INT4:
        yield "lora_base=int4", replace(choice, storage=INT4), work
    if OPTIMIZERS[work.optimizer].weight_bytes or OPTIMIZERS[work.optimizer].matrix_bytes:
        yield "optimizer=adafactor", choice, replace(work, optimizer="adafactor")
    if work.hold_gradients:
        yield "max_grad_norm=0", choice, replace(work, hold_gradients=False)
    yield from _less_work(config, work, choice)
    if not config.lora.lora_rank and adapts_a_base(config):
        yield "lora_rank=8", choice, replace(work, trained=trained_counts(config.changed(lora_rank=8)))


def _less_work(config: Config, work: Workload, choice: ExecutionPlan) -> Iterator[tuple[str, ExecutionPlan, Workload]]:
    if config.data.max_seq_len >= 16:
        half = config.data.max_seq_len // 2
        shorter = replace(
            work, source_tokens=min(work.source_tokens, half), target_tokens=_shorter_target(config, work, half), shapes=None,
            evaluation=None,
        )  # fmt: skip
        yield f"max_seq_len={half}", choice, shorter
    if work.rows > 1:
        fewer = replace(work, rows=max(1, work.rows // 2), shapes=None)
        rows = min(fewer.rows, choice.batch_size_per_gpu)
        yield f"effective_batch_size={fewer.rows}", _cut(fewer, choice, rows), fewer


def _shorter_target(config: Config, work: Workload, max_seq_len: int) -> int:
    """Decoder tokens of the longest row with a smaller `max_seq_len`, which bounds them only where nothing else does."""
    if config.data.max_target_len != AUTO:
        return work.target_tokens
    if config.train.is_finetune or config.data.objective in ("pairs", "prefix", PREFERENCES):
        return min(work.target_tokens, work.answers * max_seq_len)
    return max(1, work.target_tokens // 2)  # what masks leave out of a row goes with its length


def refusal(config: Config, work: Workload, machine: Machine, least: ExecutionPlan) -> list[str]:
    """What is said where no way fits: the phase, the batch, what is needed and what there is; then at most three changes.

    Args:
        least: the way to run that needs the least.
    """
    phases = predict(work, least, machine)
    phase, peak = peak_of(phases)
    parts = sorted(phases[phase].items(), key=lambda item: -item[1])[:4]
    rows = least.eval_batch_size_per_gpu if phase == "evaluation" else least.batch_size_per_gpu
    longest = (work.evaluation_shapes if phase == "evaluation" else work.step_shapes).longest_row
    free = max(0, machine.budget_bytes - machine.base_bytes)
    told = say(
        "--memory_budget = {budget}, does not hold this run: the least it needs is about {peak} ({parts}), in phase {phase} "
        "with micro-batch {rows} x {source} + {target} tokens; the process itself leaves {free} free",
        budget=format_size(machine.budget_bytes), peak=format_size(peak), phase=say(phase), rows=rows,
        parts=join(", ", [join(" ", [say(name), format_size(size)]) for name, size in parts]),
        source=longest.source, target=longest.target, free=format_size(free),
    )  # fmt: skip
    changes = []
    for change in cheapest_changes(config, work, machine, least, most=2):
        helps = "--{flag} would fit, with about {peak}"
        if not change.fits:
            helps = "--{flag} alone would need about {peak}: not enough, but it helps most"
        changes.append(say(helps, flag=change.label, peak=format_size(change.peak_bytes)))
    return [told, *changes, say("--memory_budget={enough}M would hold it as it is", enough=math.ceil(peak / MIB))]
