"""What is said where no way to run fits? What the least one needs, in which phase, and the three cheapest changes.

Each suggestion is a flag whose effect has been priced again: what is said to fit does fit, what only helps says so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

from config import Config
from memory.prediction import Choice, Machine, Work, peak_of, predict
from memory.trained import trained_counts
from memory.units import MIB, format_size

COST = {  # of a change, in what the user gives up: the cheapest is told first
    "memory_mode=ultra": 0, "mixed_precision=bf16": 1, "optimizer=adafactor": 2, "max_grad_norm=0": 2, "batch_size_per_gpu=1": 1,
    "max_seq_len": 3, "effective_batch_size": 3, "freeze=embedding": 4, "lora_rank=8": 5,
}  # fmt: skip


def refusal(config: Config, work: Work, machine: Machine, least: Choice) -> list[str]:
    """Name the phase, the batch, what is needed and what there is; then at most three changes.

    Args:
        least: the way to run that needs the least.
    """
    phases = predict(work, least, machine)
    phase, peak = peak_of(phases)
    parts = sorted(phases[phase].items(), key=lambda item: -item[1])[:4]
    rows = least.eval_batch_size_per_gpu if phase == "evaluation" else least.batch_size_per_gpu
    longest = (work.evaluation_shapes if phase == "evaluation" else work.step_shapes).longest_row
    free = max(0, machine.budget_bytes - machine.base_bytes)
    told = (
        f"--memory_budget = {format_size(machine.budget_bytes)}, does not hold this run: the least it needs is about "
        f"{format_size(peak)} ({', '.join(f'{name} {format_size(size)}' for name, size in parts)}), in phase {phase} with "
        f"micro-batch {rows} x {longest.source} + {longest.target} tokens; the process itself leaves {format_size(free)} free"
    )
    found = []
    for flag, choice, changed in _ideas(config, work, least):
        needs = peak_of(predict(changed, choice, machine))[1]
        if peak - needs > MIB:
            found.append(
                (needs > machine.budget_bytes, COST[flag if flag in COST else flag.partition("=")[0]], needs, flag)
            )
    budget = f"--memory_budget={math.ceil(peak / MIB)}M would hold it as it is"
    best = sorted(found, key=lambda one: (one[0], one[2] if one[0] else one[1], one[2]))[:2]
    return [told, *(_sentence(over, needs, flag) for over, _, needs, flag in best), budget]


def _sentence(is_over: bool, needs: int, flag: str) -> str:
    if is_over:
        return f"--{flag} alone would need about {format_size(needs)}: not enough, but it helps most"
    return f"--{flag} would fit, with about {format_size(needs)}"


def _ideas(config: Config, work: Work, least: Choice) -> Iterator[tuple[str, Choice, Work]]:
    """Changes of one flag: its text, the way to run and the work that it leads to."""
    one = replace(
        least,
        batch_size_per_gpu=1,
        num_slices=work.rows,
        num_walks=1,
        kept_blocks=0,
        malloc="small",
        eval_batch_size_per_gpu=1,
    )
    yield "batch_size_per_gpu=1", one, work
    if config.memory.memory_mode != "ultra":
        yield "memory_mode=ultra", replace(least, kept_blocks=0, malloc="small"), work
    if least.storage == "float32" and not config.lora.lora_rank:
        yield "mixed_precision=bf16", replace(least, storage="bfloat16"), work
    if work.optimizer not in ("adafactor", "sinkgd"):
        yield "optimizer=adafactor", least, replace(work, optimizer="adafactor")
    if work.hold_gradients:
        yield "max_grad_norm=0", least, replace(work, hold_gradients=False)
    if config.data.max_seq_len >= 16:
        half = config.data.max_seq_len // 2
        shorter = replace(
            work,
            source_tokens=min(work.source_tokens, half),
            target_tokens=max(1, work.target_tokens // 2),
            shapes=None,
            evaluation=None,
        )
        yield f"max_seq_len={half}", least, shorter
    if work.rows > 1:
        fewer = max(1, work.rows // 2)
        slices = math.ceil(fewer / least.batch_size_per_gpu)
        yield (
            f"effective_batch_size={fewer}",
            replace(least, num_slices=slices, num_walks=1),
            replace(work, rows=fewer, shapes=None),
        )
    if not config.lora.lora_rank and config.train.is_finetune:
        adapted = copy.deepcopy(config)
        adapted.lora.lora_rank = 8
        yield "lora_rank=8", least, replace(work, trained=trained_counts(adapted))
