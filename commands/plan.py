"""What does `plan` show? The choice for this machine or another, its parts, what else could be done, and what helps.

Answers in a second or two: torch is not imported.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from config import PREFERENCES, Config, DoesNotFit, UserError
from data.batches.loader import StepLoader
from data.batches.objectives import lengths_of
from data.batches.step_lengths import step_lengths
from data.cache import only_if_made
from data.prepare.preparing import find_prepared
from data.prepare.seen import Rows, columns_of_shards, cut_of_shards, rows_of_files, rows_of_shards, told
from data.prepare.task import decide
from data.tokenizers.tokenizer import Tokenizer
from memory.alternatives import Alternative, cheapest_changes, other_ways
from memory.cost.disk import disk_need, free_bytes, too_full
from memory.cost.duration import predict_times, schedule_of
from memory.cost.prediction import Machine
from memory.cost.shapes import Shapes
from memory.machines import target_machine, this_machine
from memory.plan import Plan, make_work, plan
from model.shapes import weight_counts
from settings.fields import AUTO
from training.report.progress import Progress, duration
from training.report.summary import plan_rows
from training.start.schedules import resolve_steps
from units import format_size

MODES = ("standard", "low", "ultra")
MOST_CHANGES = 3
SHOWN_ROWS = 2


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
    """A plan, what it was made for, and what else could be done."""

    plan: Plan
    machine: Machine
    objective: str
    source: int
    target: int
    modes: dict[str, Plan | None]
    ways: list[Alternative]
    changes: list[Alternative]


def _found(config: Config) -> _Found:
    target = config.plan.target
    budget = config.memory.memory_budget
    machine = this_machine(budget, config.run.num_threads) if target == AUTO else target_machine(target, budget)
    objective = config.data.objective if config.data.objective != AUTO else _objective(config)
    lengths = lengths_of(config.data, objective)
    source, answer = lengths.input_tokens, lengths.target_tokens
    both = answer * (2 if objective == PREFERENCES else 1)  # a row of preferences has two answers
    chosen = timed(config, machine, plan(config, machine, source_tokens=source, target_tokens=both), source, both)
    others = {mode: _in_mode(config, machine, mode, source, both) for mode in MODES}
    work = make_work(config, machine, source, both)
    changes = cheapest_changes(config, work, machine, chosen.choice, MOST_CHANGES)
    ways = other_ways(work, machine, chosen.choice)
    return _Found(chosen, machine, objective, source, both, others, ways, changes)


def _as_json(config: Config, found: _Found) -> dict[str, Any]:
    modes = {mode: None if one is None else one.as_dict() for mode, one in found.modes.items()}
    told = {"alternatives": found.ways, "changes": found.changes}
    return {
        "plan": found.plan.as_dict(), "modes": modes,
        **{name: [one.as_dict() for one in them] for name, them in told.items()}, "machine": asdict(found.machine),
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
    title = f"plan of {config.model_preset} on {where}, {found.source} + {found.target} tokens ({found.objective})"
    total = weight_counts(config.model)["total"]
    if rows := _rows(config):
        progress.table("rows as the model will see them", rows)
    progress.table(title, [*plan_rows(chosen, total), *_untimed(chosen), _disk_row(config, chosen)])
    progress.table("peak by phase", [(phase, format_size(size)) for phase, size in chosen.phases.items()])
    progress.table("the modes", [_mode_row(mode, one, chosen) for mode, one in found.modes.items()])
    head = ("way", "micro-batch", "recomputed", "peak", "speed")
    progress.table("other ways", [head, *(_way_row(way, chosen) for way in found.ways)])
    progress.table("cheapest changes for less memory", [_change_row(change, chosen) for change in found.changes])


def timed(config: Config, machine: Machine, chosen: Plan, source: int, target: int) -> Plan:
    """The plan with how long a run would take: known where its steps are, by flag or because its data is prepared.

    Rows of prepared data count with their own lengths, others as the longest.
    """
    prepared = None
    if config.data.train_file is not None:
        with suppress(UserError):  # a plan may be made for data that is elsewhere
            prepared = find_prepared(config)
    if prepared is None and config.train.max_steps == AUTO:
        return chosen
    work, held_out = make_work(config, machine, source, target), config.train.eval_rows
    if prepared is None:
        config = resolve_steps(config, chosen.effective_batch_size, 0)
    else:
        train, validation = (
            StepLoader(split, prepared.objective, config) for split in (prepared.train_dir, prepared.validation_dir)
        )
        held_out = validation.num_rows
        config = resolve_steps(config, chosen.effective_batch_size, train.num_rows)
        steps = range(int(config.train.max_steps))
        found = step_lengths(train, prepared.train_dir, steps, chosen.effective_batch_size)
        work = replace(work, shapes=Shapes(found.sources, found.targets, found.is_complete))
    schedule = schedule_of(config, 0, held_out, target)
    total = predict_times(work, chosen.choice, machine, schedule).total()
    return replace(chosen, seconds_total=total.seconds, seconds_low=total.low, seconds_high=total.high)


def _untimed(chosen: Plan) -> list[tuple[str, str]]:
    if chosen.seconds_total is not None:
        return []
    step = f"about {duration(chosen.seconds)} a step" if chosen.seconds >= 1 else f"about {chosen.seconds:.2f} s a step"
    return [("time", f"{step}; of the whole run: prepare its data first, or name --max_steps")]


def _rows(config: Config) -> Rows:
    """The first rows, as far as this is known without preparing them."""
    if config.data.train_file is None:
        return []
    with suppress(UserError):
        prepared = find_prepared(config)
        if prepared is not None:
            loader = StepLoader(prepared.train_dir, prepared.objective, config)
            table = told(
                rows_of_shards(loader, Tokenizer.load(prepared.tokenizer_dir), SHOWN_ROWS), columns_of_shards(prepared)
            )
            cut = cut_of_shards(config, prepared)
        else:
            known = config.data.tokenizer_dir != AUTO
            task, rows, cut = rows_of_files(
                config, SHOWN_ROWS, only_if_made, None if known else Path(config.data.cache_dir)
            )
            table = told(rows, task.columns)
        return [*table, *([("cut", cut)] if cut else [])]
    return []


def _disk_row(config: Config, chosen: Plan) -> tuple[str, str]:
    """What the run will write, and what stands against it on this machine."""
    need = disk_need(config, chosen.choice.storage)
    if config.plan.target != AUTO:
        return "disk", need.describe()
    problems, notes = too_full(need, config.run.output_dir)
    free = f"{need.describe()}; {format_size(free_bytes(config.run.output_dir))} free"
    return "disk", "; ".join([*problems, *notes]) or free


def _objective(config: Config) -> str:
    if config.data.train_file is None:
        return "pairs" if config.train.is_finetune else "span"
    return decide(config).objective


def _in_mode(config: Config, machine: Machine, mode: str, source: int, target: int) -> Plan | None:
    try:
        return plan(config.changed(memory_mode=mode), machine, source_tokens=source, target_tokens=target)
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
