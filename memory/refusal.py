"""What is said where no way to run fits? What the least one needs, in which phase, and the three cheapest changes."""

from __future__ import annotations

import math

from config import Config
from memory.alternatives import Alternative, cheapest_changes
from memory.prediction import Choice, Machine, Work, peak_of, predict
from memory.units import MIB, format_size


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
    budget = f"--memory_budget={math.ceil(peak / MIB)}M would hold it as it is"
    return [told, *map(_sentence, cheapest_changes(config, work, machine, least, most=2)), budget]


def _sentence(change: Alternative) -> str:
    if not change.fits:
        return (
            f"--{change.label} alone would need about {format_size(change.peak_bytes)}: not enough, but it helps most"
        )
    return f"--{change.label} would fit, with about {format_size(change.peak_bytes)}"
