"""What does `plan` show? The choice for this machine or another, its parts, what else could be done, and what helps.

Answers in a second or two: torch is not imported.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from config import Config, DoesNotFit, UserError
from memory.alternatives import Alternative, cheapest_changes, other_ways
from memory.cost.disk import disk_need, free_bytes, too_full
from memory.machines import target_machine, this_machine
from memory.plan import Plan
from model.shapes import weight_counts
from settings.fields import AUTO
from training.report.progress import Progress
from training.report.summary import plan_rows
from training.report.wording import duration
from training.start.resolving import RunSpec, resolve
from units import format_size

MODES = ("standard", "low", "ultra")
MOST_CHANGES = 3


def show(config: Config) -> None:
    """Plan, and print it: as tables, or as JSON for programs; for several targets parted by commas, a JSON list.

    Raises:
        DoesNotFit: no way fits the budget. UserError: the data or the target is not usable.
    """
    targets = config.plan.target.split(",")
    if config.plan.json and len(targets) > 1:
        print(json.dumps([_told_or_refused(config, target) for target in targets], indent=1))
    elif config.plan.json:
        print(json.dumps(_as_json(config, _found(config)), indent=1))
    else:
        _show_tables(config, _found(config))


@dataclass(frozen=True)
class _Found:
    """A run as it would be, and what else could be done."""

    spec: RunSpec
    modes: dict[str, Plan | None]
    ways: list[Alternative]
    changes: list[Alternative]

    @property
    def plan(self) -> Plan:
        return self.spec.plan


def _found(config: Config) -> _Found:
    target, budget = config.plan.target, config.memory.memory_budget
    machine = this_machine(budget, config.run.num_threads) if target == AUTO else target_machine(target, budget)
    spec = resolve(config, machine)
    modes = {mode: _in_mode(spec, mode) for mode in MODES}
    changes = cheapest_changes(config, spec.work, machine, spec.plan.choice, MOST_CHANGES)
    return _Found(spec, modes, other_ways(spec.work, machine, spec.plan.choice), changes)


def _as_json(config: Config, found: _Found) -> dict[str, Any]:
    modes = {mode: None if one is None else one.as_dict() for mode, one in found.modes.items()}
    told = {"alternatives": found.ways, "changes": found.changes}
    return {
        "plan": found.plan.as_dict(), "modes": modes,
        **{name: [one.as_dict() for one in them] for name, them in told.items()}, "machine": asdict(found.spec.machine),
        "disk": disk_need(config, found.plan.choice.storage).as_dict(),
    }  # fmt: skip


def _told_or_refused(config: Config, target: str) -> dict[str, Any]:
    config = config.changed(target=target.strip())
    try:
        return _as_json(config, _found(config))
    except UserError as error:
        return {"problems": error.problems, "exit_code": error.exit_code}


def _show_tables(config: Config, found: _Found) -> None:
    chosen, progress = found.plan, Progress(1)
    where = "this machine" if config.plan.target == AUTO else config.plan.target
    rows = found.spec.rows
    title = f"plan of {config.model_preset} on {where}, {rows.source_tokens} + {rows.target_tokens} tokens ({rows.objective})"
    total = weight_counts(config.model)["total"]
    progress.table(title, [*plan_rows(chosen, total), *_untimed(chosen), _disk_row(config, chosen)])
    progress.table("peak by phase", [(phase, format_size(size)) for phase, size in chosen.phases.items()])
    progress.table("the modes", [_mode_row(mode, one, chosen) for mode, one in found.modes.items()])
    head = ("way", "micro-batch", "recomputed", "peak", "speed")
    progress.table("other ways", [head, *(_way_row(way, chosen) for way in found.ways)])
    progress.table("cheapest changes for less memory", [_change_row(change, chosen) for change in found.changes])


def _untimed(chosen: Plan) -> list[tuple[str, str]]:
    if chosen.seconds_total is not None:
        return []
    step = f"about {duration(chosen.seconds)} a step" if chosen.seconds >= 1 else f"about {chosen.seconds:.2f} s a step"
    return [("time", f"{step}; of the whole run: prepare its data first, or name --max_steps")]


def _disk_row(config: Config, chosen: Plan) -> tuple[str, str]:
    """What the run will write, and what stands against it on this machine."""
    need = disk_need(config, chosen.choice.storage)
    if config.plan.target != AUTO:
        return "disk", need.describe()
    problems, notes = too_full(need, config.run.output_dir)
    free = f"{need.describe()}; {format_size(free_bytes(config.run.output_dir))} free"
    return "disk", "; ".join([*problems, *notes]) or free


def _in_mode(spec: RunSpec, mode: str) -> Plan | None:
    try:
        return resolve(spec.asked.changed(memory_mode=mode), spec.machine, spec.rows).plan
    except DoesNotFit:
        return None


def _mode_row(mode: str, found: Plan | None, chosen: Plan) -> tuple[str, str, str]:
    if found is None:
        return (f"--memory_mode={mode}", "does not fit", "")
    speed = f"{chosen.seconds / found.seconds:.0%} of the planned speed, about {duration(found.seconds)} a step"
    return (f"--memory_mode={mode}", format_size(found.peak_bytes), speed)


def _way_row(way: Alternative, chosen: Plan) -> tuple[str, ...]:
    recomputed = f"{chosen.num_blocks - way.saved_blocks} of {chosen.num_blocks} blocks"
    return way.label, str(way.batch_size_per_gpu), recomputed, _peak(way), f"{chosen.seconds / way.seconds:.0%}"


def _change_row(change: Alternative, chosen: Plan) -> tuple[str, str, str]:
    saves = f"{format_size(chosen.peak_bytes - change.peak_bytes)} less"
    return (
        f"--{change.label}",
        _peak(change),
        f"{saves}, a step takes {change.seconds / chosen.seconds:.2f} times as long",
    )


def _peak(found: Alternative) -> str:
    return format_size(found.peak_bytes) if found.fits else f"{format_size(found.peak_bytes)} (does not fit)"
