"""`plan`: whether a run fits, on this machine or another; peak, time, their parts, and what takes less.

Answers in a second or two: torch is not imported here; where there is a GPU, a child asks it.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from commands.row_facts import count_and_show, count_tokens
from data.prepare.looking import look
from data.task import Table
from devices.environment import may_have_gpu, prepare_environment
from memory.advice import Alternative, what_else
from memory.estimate.disk import disk_need, free_bytes, too_full
from memory.estimate.workload import Machine
from memory.machines import target_machine, this_machine, with_libraries
from memory.plan import Plan, RungOutcome, outcomes
from memory.step_settings import StepSettings
from memory.weights_in import weights_folder
from model.shapes import weight_counts
from settings.declared import Config, DataConfig, T5ModelConfig
from settings.errors import DoesNotFit, UserError, refuse
from settings.fields import AUTO, counted
from settings.precedence import model_presets
from settings.tasks import task_named
from support.child_process import ChildDied, call
from support.language import english, join, say
from support.storage import NotMade
from support.units import format_size
from training.checkpoints.folder import step_of
from training.checkpoints.runs import check_name
from training.report.progress import Progress
from training.report.summary import parts_rows, plan_rows
from training.report.wording import duration
from training.setup.answer_list import answer_sources, estimate_tree
from training.setup.base import find_base
from training.setup.data import reopens_files, rows_for
from training.setup.resolving import RunRows, RunSpec, resolve
from training.setup.resuming import resumed_config, run_to_resume

MACHINE = "training.setup.plan:machine_for"  # in a child: it imports torch
MODES = ("standard", "low", "ultra")
MOST_CHANGES = 3


@dataclass(frozen=True)
class PlannedRun:
    """A run as it would be, and what else could be done.

    Args:
        modes: the plan of each memory mode; None: it does not fit.
        changes: of one flag, after which the plan takes less.
        ladder: what each way to save memory would take.
        examples: the first rows as the model receives them.
    """

    spec: RunSpec
    modes: dict[str, Plan | None]
    changes: list[Alternative]
    ladder: list[RungOutcome]
    examples: Table


def plan(config: Config) -> None:
    """Plan, and print it: as tables, or as JSON for programs; for several targets parted by commas, a JSON list. A run
    that goes on is planned by the settings that it has saved, with the flags over them.

    Raises:
        DoesNotFit: no way fits the budget. UserError: the data or the target is not usable.
    """
    targets = [target.strip() for target in config.plan.target.split(",")]
    config, notes, steps_done = _with_start(config)
    tree_bytes = 0
    try:
        sources = answer_sources(config.answer.answers, None)
        if sources:
            tree_bytes, note = look(config, estimate_tree, config, sources, always_in_child=True)
            notes += filter(None, [note])
    except UserError:
        if targets == [AUTO]:
            raise  # The list may lie where the run will be.
    answers = list[dict[str, Any]]()
    for target in targets:
        try:
            planned = _planned(config, target, steps_done, tree_bytes)
        except UserError as error:
            if not config.plan.json or len(targets) == 1:
                raise
            problems = [english(problem) for problem in error.problems]
            answers.append({"problems": problems, "exit_code": error.exit_code})
            continue
        if config.plan.json:
            answers.append({**_as_json(planned), "start": notes})
        else:
            _show_tables(planned, target, notes)
    if config.plan.json:
        print(json.dumps(answers if len(targets) > 1 else answers[0], indent=1))


def _with_start(config: Config) -> tuple[Config, list[str], int]:
    """The settings as the run would have them when its data is looked at, notes on what it starts from, and how many
    steps it has done.

    Raises:
        UserError: what was named is not there, and no --model_preset says what it is like.
    """
    run_dir = Path(config.run.output_dir, config.run.run_name)
    requested = config
    resumed_dir = run_to_resume(config.run, config.train.is_keep_training)
    if resumed_dir is not None:
        run_dir = resumed_dir
        requested = replace(resumed_config(config, run_dir), plan=config.plan)
    elif config.run.run_name != AUTO:
        refuse(check_name(config.run.run_name))
    try:
        start = find_base(requested, run_dir, resumed_dir, reads_weights=False)
    except UserError as error:
        names_base = config.train.is_finetune or config.train.finetune_from not in (AUTO, None)
        is_shape_known = config.task.needs_base or (names_base and config.is_set("model_preset"))
        if resumed_dir or not is_shape_known:
            raise
        reason = error.problems[0].splitlines()[0]
        text = say(
            "{reason}; planned for --model_preset={model_preset}", reason=reason, model_preset=config.model_preset
        )
        return config, [text], 0
    config = start.config
    if start.is_resumed:
        assert start.folder is not None
        steps_done = step_of(start.folder)
        return config, [say("{run} continues after step {step}", run=run_dir.name, step=steps_done)], steps_done
    if start.folder is not None:
        return config, start.reasons or [say("starting from {model}", model=start.folder)], 0
    if config.data.train_file is not None and not (config.is_set("vocab_size") or config.task.writes_text):
        with suppress(UserError, NotMade):  # RunRows.find says what is wrong.
            tokens = look(config, count_tokens, config)
            if tokens:
                config = config.with_changes(vocab_size=rows_for(tokens))
    return config, start.reasons, 0


def _planned(config: Config, target: str, steps_done: int, tree_bytes: int) -> PlannedRun:
    """The plan of a run on the machine that is named, or on this one with the device that `train` would take.

    Args:
        tree_bytes: of the list that answers come from.
    Raises:
        DoesNotFit: no way fits the budget. UserError: the machine or the device is not there, or the data are not
            usable.
    """
    machine = with_libraries(_machine(config, target), config.metrics)
    if machine.base_bytes:
        machine = replace(machine, base_bytes=machine.base_bytes + tree_bytes)
    rows = RunRows.find(config, machine)
    config = config.with_changes(objective=rows.objective)
    count = 0
    examples: Table = []
    if config.data.train_file is not None:
        with suppress(UserError, OSError):
            count, examples = look(config, count_and_show, config)
    try:
        spec = _counted(resolve(config, machine, rows, done=steps_done), count)
    except DoesNotFit as error:
        raise DoesNotFit(*error.problems, *_assumed(rows, config.data)) from None

    def plan_of(other: Config) -> Plan:
        limit = other.memory.memory_budget
        here = machine if limit == AUTO else replace(machine, budget_bytes=min(machine.budget_bytes, int(limit)))
        is_same = other.data == config.data and other.train.effective_batch_size == config.train.effective_batch_size
        its_rows = spec.rows
        if its_rows.sample is not None:
            its_rows = RunRows.from_sample(other, here, its_rows.sample)
        elif its_rows.lengths is None or not is_same:
            its_rows = RunRows.find(other, here)
        return resolve(other, here, its_rows).plan

    modes: dict[str, Plan | None] = dict.fromkeys(MODES)
    for mode in MODES:
        with suppress(UserError):  # It does not fit, or a setting that is asked for is not possible there.
            modes[mode] = plan_of(config.with_changes(memory_mode=mode))
    changes = what_else(config, spec.plan, plan_of, MOST_CHANGES)
    ladder = outcomes(StepSettings.of(config), spec.work, machine, spec.plan)
    return PlannedRun(spec, modes, changes, ladder, examples)


def _machine(config: Config, target: str) -> Machine:
    budget = config.memory.memory_budget
    if target != AUTO:
        return target_machine(target, budget)
    folder = weights_folder(config.memory, config.run)
    device = config.run.device
    if device != "cpu" and (device != AUTO or may_have_gpu()):
        try:
            machine: Machine = call(MACHINE, device, budget, folder, setup=prepare_environment, is_quiet=True)
            return machine
        except ChildDied as death:
            print(say("planned for the CPU, as torch does not start: {error}", error=str(death)), file=sys.stderr)
    return this_machine(budget, config.run.num_threads, folder)


def _assumed(rows: RunRows, data: DataConfig) -> list[str]:
    """On which rows a plan rests, where they are not prepared."""
    if rows.sample is not None:
        text = (
            "lengths are estimated from {sample}, with a margin; `train` plans again from all prepared rows before "
            "step 1"
        )
        return [say(text, sample=rows.sample.describe())]
    if rows.lengths is not None or data.train_file is None or task_named(rows.objective).is_windowed:
        return []
    text = (
        "data is not prepared yet, so rows are assumed to be as long as --max_seq_len={source} and "
        "--max_target_len={target} allow; after `prepare` with the same flags the plan uses their real lengths"
    )
    return [say(text, source=data.max_seq_len, target=data.max_target_len)]


def _counted(spec: RunSpec, count: int) -> RunSpec:
    """The run with about so many rows, where nothing is prepared and no steps are named, and remarks on that."""
    config = spec.config
    remarks = _assumed(spec.rows, config.data)
    text = "time: for about {rows} ({steps}) with the lengths of the sample; exact once the data is prepared"
    if spec.rows.sample is not None:
        count = 0 if config.train.max_steps != AUTO else spec.rows.sample.about_rows
        longest = RunRows.longest_allowed(config.data, spec.rows.objective, config.train.eval_rows)
        try:
            peak = format_size(resolve(config, spec.machine, longest).plan.peak_bytes)
            remarks.append(
                say("{peak} if all rows were as long as --max_seq_len and --max_target_len allow", peak=peak)
            )
        except UserError:
            remarks.append(
                say(
                    "it fits with these lengths, but would not if all rows were as long as --max_seq_len "
                    "and --max_target_len allow; `train` would report that"
                )
            )
    elif count and spec.steps is None:
        text = "time: for about {rows} ({steps}) of maximum length; exact once the data is prepared"
        spec = resolve(config, spec.machine, replace(spec.rows, count=count), done=spec.done)
    else:
        count = 0
    if count:
        remarks.append(say(text, rows=counted(count, "row"), steps=counted(spec.run_steps.max_steps, "step")))
    return replace(spec, plan=replace(spec.plan, reasons=(*spec.plan.reasons, *remarks)))


def _as_json(planned: PlannedRun) -> dict[str, Any]:
    chosen = planned.spec.plan
    return {
        "plan": chosen.as_dict(),
        "modes": {mode: None if one is None else asdict(one) for mode, one in planned.modes.items()},
        "ladder": [{**asdict(rung), "name": english(rung.name)} for rung in planned.ladder],
        "alternatives": [asdict(one) for one in [Alternative.of("planned", chosen), *planned.changes]],
        "changes": [asdict(change) for change in planned.changes],
        "machine": asdict(planned.spec.machine),
        "disk": disk_need(planned.spec.config, chosen.choice.storage, chosen.choice, chosen.seconds).as_dict(),
    }


def _show_tables(planned: PlannedRun, target: str, notes: list[str]) -> None:
    progress = Progress(1)
    for note in notes:
        progress.note(note)
    spec = planned.spec
    config = spec.config
    chosen = spec.plan
    what = say(
        "{model} on {machine}, {source} + {target} tokens ({objective})",
        model=_named(config.model_preset, config.model),
        machine=(spec.machine.device or say("this machine")) if target == AUTO else target,
        source=spec.rows.source_tokens,
        target=spec.rows.target_tokens,
        objective=spec.rows.objective,
    )
    title = say("fits: {what}", what=what)
    need = disk_need(config, chosen.choice.storage, chosen.choice, chosen.seconds)
    disk = need.describe()
    if target == AUTO:  # This machine has a disk to look at.
        problems, remarks = too_full(need, config.run.output_dir)
        if problems:
            title = say("does not fit on the disk: {what}", what=what)
        free = say("{need}; {size} free", need=disk, size=format_size(free_bytes(config.run.output_dir)))
        disk = join("; ", [*problems, *remarks] or [free])
    reopens = reopens_files(config.memory.ultra_low_mem, spec.machine.available_bytes)
    first, *rows = plan_rows(chosen, weight_counts(config.model)["total"], reopens, disk)
    if chosen.seconds_total is None:
        untimed = say(
            "{thousand} for 1,000 steps (add --train_file or --max_steps for your run's total)",
            thousand=duration(1000 * chosen.seconds),
        )
        rows.insert(0, (say("time"), untimed))
    progress.table(title, [first, *rows])
    progress.table(say("parts of the peak"), parts_rows(chosen))
    progress.table(say("peak by phase"), [(say(phase), format_size(size)) for phase, size in chosen.phases.items()])
    ladder = list[tuple[str, str, str, str]]()
    for rung in planned.ladder:
        mark = ">" if rung.is_chosen else " "
        time = say("{step} per step", step=_step(rung.seconds)) if rung.fits else say("does not fit")
        ladder.append((mark, rung.name, format_size(rung.peak_bytes), time))
    progress.table(say("ladder: the first rung that fits is taken, unless one below it is over 5% faster"), ladder)
    modes = list[tuple[str, str, str]]()
    for mode, one in planned.modes.items():
        row: tuple[str, str] = (say("does not fit"), "")
        if one is not None:
            row = (format_size(one.peak_bytes), _speed(chosen, one.seconds))
        modes.append((f"--memory_mode={mode}", *row))
    progress.table(say("memory modes"), modes)
    changes = list[tuple[str, str, str]]()
    for change in planned.changes:
        less = format_size(chosen.peak_bytes - change.peak_bytes)
        gain = say("{size} less, {speed}", size=less, speed=_speed(chosen, change.seconds))
        changes.append((f"--{change.label}", format_size(change.peak_bytes), gain))
    if changes:
        progress.table(say("to use less memory"), changes)
    if planned.examples:
        progress.table(say("examples exactly as the model receives them"), planned.examples)


def _named(preset: str, shape: T5ModelConfig) -> str:
    if all(getattr(shape, name) == value for name, value in model_presets().get(preset, {}).items()):
        return preset
    return say(
        "d_model {width}, {encoder} + {decoder} blocks, vocabulary {tokens}",
        width=shape.d_model,
        encoder=shape.num_layers,
        decoder=shape.num_decoder_layers,
        tokens=f"{shape.vocab_size:,}",
    )


def _speed(chosen: Plan, seconds: float) -> str:
    """Steps beside those of the plan; where rows or tokens are fewer, a step is less work."""
    text = "{share} of the planned speed, about {step} per step"
    return say(text, share=f"{chosen.seconds / seconds:.0%}", step=_step(seconds))


def _step(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else say("{seconds} s", seconds=f"{seconds:.2f}")
