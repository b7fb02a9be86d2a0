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

from common.child_process import ChildDied, call
from common.language import english, join, say
from common.storage import NotMade, only_if_made
from common.units import format_size
from data.batches.loader import StepLoader
from data.batches.rows import lengths_of
from data.prepare.estimate import estimate_lengths
from data.prepare.looking import look
from data.prepare.preparing import find_prepared
from data.prepare.preview import table_of_files, table_of_shards
from data.prepare.training_data import find_training_data
from data.sources.peek import about_rows, about_tokens
from data.task import Table
from data.tokenizers.tokenizer import Tokenizer
from devices.environment import may_have_gpu, prepare_environment
from memory.advice import Alternative, what_else
from memory.estimate.disk import disk_need, free_bytes, too_full
from memory.machines import target_machine, this_machine, with_libraries
from memory.plan import Plan, RungOutcome, outcomes
from memory.step_settings import StepSettings
from memory.weights_in import weights_folder
from model.shapes import weight_counts
from settings.alternatives import with_changes
from settings.declared import Config, DataConfig, T5ModelConfig
from settings.errors import DoesNotFit, UserError, refuse
from settings.fields import AUTO, counted
from settings.precedence import model_presets
from settings.tasks import task_named
from training.checkpoints.folder import step_of
from training.checkpoints.runs import check_name
from training.report.progress import Progress
from training.report.summary import parts_rows, plan_rows
from training.report.wording import duration
from training.setup.answer_list import answer_sources, foreseen_tree
from training.setup.base import find_base
from training.setup.data import reopens_files, rows_for
from training.setup.resolving import RunRows, RunSpec, resolve
from training.setup.resuming import resumed_config, run_to_resume

MACHINE = "training.setup.plan:machine_for"  # in a child: it imports torch
MODES = ("standard", "low", "ultra")
MOST_CHANGES = 3
SHOWN_ROWS = 2


@dataclass(frozen=True)
class PlannedRun:
    """A run as it would be, and what else could be done.

    Args:
        modes: the plan of each memory mode; None: it does not fit.
        changes: of one flag, after which the plan takes less.
        ladder: what each way to save memory would take.
    """

    spec: RunSpec
    modes: dict[str, Plan | None]
    changes: list[Alternative]
    ladder: list[RungOutcome]


def plan(config: Config) -> None:
    """Plan, and print it: as tables, or as JSON for programs; for several targets parted by commas, a JSON list. A run
    that goes on is planned by the settings that it has saved, with the flags over them.

    Raises:
        DoesNotFit: no way fits the budget. UserError: the data or the target is not usable.
    """
    is_json = config.plan.json
    targets = [target.strip() for target in config.plan.target.split(",")]
    config, notes, done = _with_start(config)
    tree_bytes = 0
    try:
        sources = answer_sources(config.answer.answers, None)
        if sources:
            tree_bytes, of_answers = look(config, foreseen_tree, config, sources, always_in_child=True)
            notes += [of_answers] if of_answers else []
    except UserError:
        if targets == [AUTO]:
            raise  # Else the list may lie where the run will be.
    answers = list[dict[str, Any]]()
    for target in targets:
        try:
            planned = _planned(config, target, done, tree_bytes)
        except UserError as error:
            if not is_json or len(targets) == 1:
                raise
            problems = [english(problem) for problem in error.problems]
            answers.append({"problems": problems, "exit_code": error.exit_code})
            continue
        if is_json:
            answers.append({**_as_json(planned), "start": notes})
        else:
            _show_tables(planned, target, notes)
    if is_json:
        print(json.dumps(answers if len(targets) > 1 else answers[0], indent=1))


def _with_start(config: Config) -> tuple[Config, list[str], int]:
    """The settings as the run would have them when its data is looked at, notes on what it starts from, and how many
    steps it has done.

    Raises:
        UserError: what was named is not there, and no --model_preset says what it is like.
    """
    run_dir = Path(config.run.output_dir, config.run.run_name)
    asked = config
    resumed_dir = run_to_resume(config.run, config.train.is_keep_training)
    if resumed_dir is not None:
        run_dir = resumed_dir
        asked = replace(resumed_config(config, run_dir), plan=config.plan)
    elif config.run.run_name != AUTO:
        refuse(check_name(config.run.run_name))
    try:
        start = find_base(asked, run_dir, resumed_dir, reads_weights=False)
    except UserError as error:
        needs_base = config.task.needs_base
        names_base = config.train.is_finetune or config.train.finetune_from not in (AUTO, None)
        if resumed_dir or not (needs_base or (names_base and config.given("model_preset"))):
            raise
        reason = error.problems[0].splitlines()[0]
        text = say(
            "{reason}; planned for --model_preset={model_preset}", reason=reason, model_preset=config.model_preset
        )
        return config, [text], 0
    if start.is_resumed:
        assert start.folder is not None
        done = step_of(start.folder)
        return start.config, [say("{run} continues after step {step}", run=run_dir.name, step=done)], done
    if start.folder is not None:
        return start.config, start.reasons or [say("starting from {model}", model=start.folder)], 0
    known = start.config
    tokens = 0
    if known.data.train_file is not None and not (known.given("vocab_size") or known.task.writes_text):
        with suppress(UserError, NotMade):  # What is wrong is said where the rows are looked at.
            data = look(known, find_prepared, known)
            if data is not None:
                tokens = Tokenizer.load(data.tokenizer_dir).size
            else:
                groups = known.data, known.train.is_finetune, known.model, known.tokenizer, known.cleaning
                sample = look(known, estimate_lengths, *groups)
                tokens = 0 if sample is None else sample.vocabulary
    return with_changes(known, vocab_size=rows_for(tokens)) if tokens else known, start.reasons, 0


def _planned(config: Config, target: str, done: int, tree_bytes: int) -> PlannedRun:
    """The plan of a run on the machine that is named, or on this one with the device that `train` would take.

    Args:
        done: steps so far. tree_bytes: of the list that answers come from.
    Raises:
        DoesNotFit: no way fits the budget. UserError: the machine or the device is not there, or the data are not
            usable.
    """
    budget = config.memory.memory_budget
    if target == AUTO:
        folder = weights_folder(config.memory, config.run)
        machine = this_machine(budget, config.run.num_threads, folder)
        if config.run.device != "cpu" and (config.run.device != AUTO or may_have_gpu()):
            try:
                of_device = config.run.device, budget, folder
                machine = call(MACHINE, *of_device, setup=prepare_environment, is_quiet=True)
            except ChildDied as death:
                print(say("planned for the CPU, as torch does not start: {error}", error=str(death)), file=sys.stderr)
    else:
        machine = target_machine(target, budget)
    machine = with_libraries(machine, config.metrics)
    if machine.base_bytes:
        machine = replace(machine, base_bytes=machine.base_bytes + tree_bytes)
    rows = RunRows.known(config, machine)
    config = with_changes(config, objective=rows.objective)
    try:
        spec = _counted(resolve(config, machine, rows, done=done))
    except DoesNotFit as error:
        raise DoesNotFit(*error.problems, *_assumed(rows, config.data)) from None

    def plan_of(other: Config) -> Plan:
        limit = other.memory.memory_budget
        here = machine if limit == AUTO else replace(machine, budget_bytes=min(machine.budget_bytes, int(limit)))
        is_same = other.data == config.data and other.train.effective_batch_size == config.train.effective_batch_size
        its_rows = spec.rows
        if its_rows.sample is not None:
            its_rows = RunRows.of_sample(other, here, its_rows.sample)
        elif its_rows.lengths is None or not is_same:
            its_rows = RunRows.known(other, here)
        return resolve(other, here, its_rows).plan

    modes: dict[str, Plan | None] = dict.fromkeys(MODES)
    for mode in MODES:
        with suppress(UserError):  # It does not fit, or a setting that is asked for is not possible there.
            modes[mode] = plan_of(with_changes(config, memory_mode=mode))
    changes = what_else(config, spec.plan, plan_of, MOST_CHANGES)
    return PlannedRun(spec, modes, changes, outcomes(StepSettings.of(config), spec.work, machine, spec.plan))


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


def _counted(spec: RunSpec) -> RunSpec:
    """The run with about as many rows as its files hold, where nothing is prepared and no steps are named, and remarks
    on that.
    """
    config = spec.config
    remarks = _assumed(spec.rows, config.data)
    count = 0
    text = "time: for about {rows} ({steps}) with the lengths of the sample; exact once the data is prepared"
    if spec.rows.sample is not None:
        count = 0 if config.train.max_steps != AUTO else spec.rows.sample.about_rows
        try:
            peak = format_size(
                resolve(
                    config, spec.machine, RunRows.as_set(config.data, spec.rows.objective, config.train.eval_rows)
                ).plan.peak_bytes
            )
            remarks.append(
                say("{peak} if all rows were as long as --max_seq_len and --max_target_len allow", peak=peak)
            )
        except UserError:
            remarks.append(
                say(
                    "it fits with these lengths; it would not if all rows were as long as --max_seq_len and "
                    "--max_target_len allow, and `train` would say so"
                )
            )
    elif spec.steps is None and config.data.train_file is not None:
        text = "time: for about {rows} ({steps}) of maximum length; exact once the data is prepared"
        with suppress(UserError, OSError):
            data = look(config, find_training_data, config.data, config.train.is_finetune, only_if_made)
            if data.task.is_windowed:
                count = about_tokens(data.sources) // lengths_of(config.data, data.objective).raw_tokens
            else:
                count = look(config, about_rows, data.sources)
            count = max(1, min(count, config.data.max_samples or count))
            spec = resolve(config, spec.machine, replace(spec.rows, count=count), done=spec.done)
    if count:
        remarks.append(say(text, rows=counted(count, "row"), steps=counted(spec.counted.max_steps, "step")))
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
    if target == AUTO:  # What stands against it on this machine.
        problems, remarks = too_full(need, config.run.output_dir)
        if problems:
            title = say("does not fit on the disk: {what}", what=what)
        free = say("{need}; {size} free", need=disk, size=format_size(free_bytes(config.run.output_dir)))
        disk = join("; ", [*problems, *remarks] or [free])
    reopens = reopens_files(config.memory.ultra_low_mem, spec.machine.available_bytes)
    first, *others = plan_rows(chosen, weight_counts(config.model)["total"], reopens, disk)
    if chosen.seconds_total is None:
        untimed = say(
            "{thousand} for 1,000 steps (add --train_file or --max_steps for your run's total)",
            thousand=duration(1000 * chosen.seconds),
        )
        others.insert(0, (say("time"), untimed))
    progress.table(title, [first, *others])
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
    if examples := _examples(spec):
        progress.table(say("examples exactly as the model receives them"), examples)


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


def _examples(spec: RunSpec) -> Table:
    """The first rows as the model receives them, where the files are here and nothing has to be trained or prepared for
    that.
    """
    config = spec.config
    if config.data.train_file is None:
        return []
    with suppress(UserError):
        prepared = look(config, find_prepared, config)
        if prepared is not None:
            loader = StepLoader(prepared.train_dir, prepared.objective, config.data, config.model, config.run.seed)
            tokenizer = Tokenizer.load(prepared.tokenizer_dir)
            return table_of_shards(config.data, prepared, loader, tokenizer, SHOWN_ROWS)
        rows = look(config, find_training_data, config.data, config.train.is_finetune, only_if_made)
        is_known = config.data.tokenizer_dir != AUTO and config.data.extra_tokens is None
        folder = Path(config.data.tokenizer_dir) if is_known else None
        return look(config, table_of_files, config.data, rows, config.cleaning, SHOWN_ROWS, folder)
    return []


def _speed(chosen: Plan, seconds: float) -> str:
    """Steps beside those of the plan; where rows or tokens are fewer, a step is less work."""
    text = "{share} of the planned speed, about {step} per step"
    return say(text, share=f"{chosen.seconds / seconds:.0%}", step=_step(seconds))


def _step(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else say("{seconds} s", seconds=f"{seconds:.2f}")
