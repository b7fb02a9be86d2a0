"""What does `plan` show? The choice for this machine or another, its parts, what else could be done, and what helps.

Answers in a second or two: torch is not imported.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict

from config import PREFERENCES, Config, DoesNotFit
from data.objectives import lengths_of
from data.task import decide
from memory.alternatives import Alternative, cheapest_changes, other_ways
from memory.machines import target_machine, this_machine
from memory.plan import Plan, make_work, plan
from memory.prediction import Machine, weight_counts
from memory.units import format_size
from settings import AUTO
from training.progress import Progress, duration
from training.report import plan_rows

MODES = ("standard", "low", "ultra")
MOST_CHANGES = 3


def show(config: Config) -> None:
    """Plan, and print it: as tables, or as JSON for programs.

    Raises:
        DoesNotFit: no way fits the budget. UserError: the data or the target is not usable.
    """
    target = config.plan.target
    budget = config.memory.memory_budget
    machine = this_machine(budget) if target == AUTO else target_machine(target, budget)
    objective = config.data.objective if config.data.objective != AUTO else _objective(config)
    lengths = lengths_of(config.data, objective)
    source, answer = lengths.input_tokens, lengths.target_tokens
    both = answer * (2 if objective == PREFERENCES else 1)  # a row of preferences has two answers
    chosen = plan(config, machine, source_tokens=source, target_tokens=both)
    others = {mode: _in_mode(config, machine, mode, source, both) for mode in MODES}
    work = make_work(config, machine, source, both)
    ways = other_ways(work, machine, chosen.choice)
    changes = cheapest_changes(config, work, machine, chosen.choice, MOST_CHANGES)
    if config.plan.json:
        modes = {mode: None if found is None else found.as_dict() for mode, found in others.items()}
        told = {name: [one.as_dict() for one in them] for name, them in (("alternatives", ways), ("changes", changes))}
        print(json.dumps({"plan": chosen.as_dict(), "modes": modes, **told, "machine": asdict(machine)}, indent=1))
        return
    progress = Progress(1)
    where = "this machine" if target == AUTO else target
    title = f"plan of {config.model_preset} on {where}, {source} + {both} tokens ({objective})"
    progress.table(title, plan_rows(chosen, weight_counts(config.model)["total"]))
    progress.table("peak by phase", [(phase, format_size(size)) for phase, size in chosen.phases.items()])
    progress.table("the modes", [_mode_row(mode, found, chosen) for mode, found in others.items()])
    head = ("way", "micro-batch", "graphs kept", "peak", "speed")
    progress.table("other ways", [head, *(_way_row(way, chosen) for way in ways)])
    progress.table("cheapest changes for less memory", [_change_row(change, chosen) for change in changes])


def _objective(config: Config) -> str:
    if config.data.train_file is None:
        return "pairs" if config.train.is_finetune else "span"
    return decide(config).objective


def _in_mode(config: Config, machine: Machine, mode: str, source: int, target: int) -> Plan | None:
    changed = copy.deepcopy(config)
    changed.memory.memory_mode = mode
    try:
        return plan(changed, machine, source_tokens=source, target_tokens=target)
    except DoesNotFit:
        return None


def _mode_row(mode: str, found: Plan | None, chosen: Plan) -> tuple[str, str, str]:
    if found is None:
        return (f"--memory_mode={mode}", "does not fit", "")
    speed = f"{chosen.seconds / found.seconds:.0%} of the planned speed, about {duration(found.seconds)} a step"
    return (f"--memory_mode={mode}", format_size(found.peak_bytes), speed)


def _way_row(way: Alternative, chosen: Plan) -> tuple[str, ...]:
    kept = f"{way.kept_blocks} of {chosen.num_blocks}"
    return way.label, str(way.batch_size_per_gpu), kept, _peak(way), f"{chosen.seconds / way.seconds:.0%}"


def _change_row(change: Alternative, chosen: Plan) -> tuple[str, str, str]:
    saves = f"{format_size(chosen.peak_bytes - change.peak_bytes)} less"
    return (
        f"--{change.label}",
        _peak(change),
        f"{saves}, a step takes {change.seconds / chosen.seconds:.2f} times as long",
    )


def _peak(found: Alternative) -> str:
    return format_size(found.peak_bytes) if found.fits else f"{format_size(found.peak_bytes)} (does not fit)"
