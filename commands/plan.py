"""`plan`: whether a run fits, on this machine or another; peak, time, their parts, and what takes less.

Answers in a second or two: torch is not imported here; where there is a GPU, a child asks it.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from childproc import ChildDied, call
from data.batches.loader import StepLoader
from data.batches.rows import lengths_of
from data.prepare.estimate import estimate_lengths
from data.prepare.looking import ask, look
from data.prepare.preparing import find_prepared
from data.prepare.preview import table_of_files, table_of_shards
from data.prepare.training_data import find_training_data
from data.sources.peek import about_rows, about_tokens
from data.task import Table
from data.tokenizers.tokenizer import Tokenizer
from devices.environment import may_have_gpu, prepare_environment
from language import english, join, say
from memory.advice import Alternative, what_else
from memory.estimate.disk import disk_need, free_bytes, too_full
from memory.estimate.workload import Machine
from memory.machines import target_machine, this_machine, with_libraries
from memory.plan import Plan, RungOutcome, outcomes
from memory.weights_in import weights_folder
from model.shapes import weight_counts
from settings.declared import Config
from settings.errors import DoesNotFit, UserError, refuse
from settings.fields import AUTO, counted
from settings.precedence import model_presets
from settings.tasks import task_named
from storage import NotMade, only_if_made
from training.checkpoints.folder import step_of
from training.checkpoints.runs import check_name
from training.report.progress import Progress
from training.report.summary import parts_rows, plan_rows
from training.report.wording import duration
from training.setup.answer_list import answer_sources, foreseen_tree
from training.setup.base import find_base
from training.setup.data import reopens_files, rows_for
from training.setup.resolving import Rows, RunSpec, resolve
from training.setup.resuming import find_run_to_resume, goes_on, resumed_config
from units import format_size

MACHINE = "training.setup.plan:machine_for"  # in a child: it imports torch
MODES = ("standard", "low", "ultra")
MOST_CHANGES = 3
SHOWN_ROWS = 2


def plan(config: Config) -> None:
    """Plan, and print it: as tables, or as JSON for programs; for several targets parted by commas, a JSON list. A run that
    goes on is planned by the settings that it has saved, with the flags over them.

    Raises:
        DoesNotFit: no way fits the budget. UserError: the data or the target is not usable.
    """
    config, told, done = _with_start(config)
    tree_bytes = 0
    try:
        sources = answer_sources(config.answer.answers, None)
        if sources:
            tree_bytes, of_answers = ask(config, foreseen_tree, config, sources)
            told = [*told, of_answers]
    except UserError:
        if config.plan.target == AUTO:
            raise  # else the list may lie where the run will be
    targets = config.plan.target.split(",")
    if config.plan.json and len(targets) > 1:
        answers = list[dict[str, Any]]()
        for target in targets:
            asked = config.changed(target=target.strip())
            try:
                answers.append(_as_json(asked, _found(asked, done, tree_bytes), told))
            except UserError as error:
                problems = [english(problem) for problem in error.problems]
                answers.append({"problems": problems, "exit_code": error.exit_code})
        print(json.dumps(answers, indent=1))
    elif config.plan.json:
        print(json.dumps(_as_json(config, _found(config, done, tree_bytes), told), indent=1))
    else:
        for text in told:
            print(text)
        _show_tables(config, _found(config, done, tree_bytes))


def _with_start(config: Config) -> tuple[Config, list[str], int]:
    """The settings as the run would have them when its data is looked at, what is told of what it starts from, and how many steps
    it has done.

    Raises:
        UserError: what was named is not there, and no --model_preset says what it is like.
    """
    train = config.train
    run_dir = Path(config.run.output_dir, config.run.run_name)
    resumed_dir = None
    known = config
    if goes_on(config.run, train.is_keep_training):
        run_dir = resumed_dir = find_run_to_resume(config.run.output_dir, config.run.run_name)
        known = replace(resumed_config(config, run_dir), plan=config.plan)
    elif config.run.run_name != AUTO:
        refuse(check_name(config.run.run_name))
    try:
        start = find_base(known, run_dir, resumed_dir, reads_weights=False)
    except UserError as error:
        needs_base = config.task.needs_base or train.is_finetune or train.finetune_from not in (AUTO, None)
        if resumed_dir or not needs_base or not (config.task.needs_base or config.given("model_preset")):
            raise
        assumed = say(
            "{reason}; planned for --model_preset={model_preset}",
            reason=error.problems[0].splitlines()[0],
            model_preset=config.model_preset,
        )
        return config, [assumed], 0
    if start.folder is not None and start.is_resumed:
        done = step_of(start.folder)
        return start.config, [say("{run} continues after step {step}", run=run_dir.name, step=done)], done
    if start.folder is not None:
        return start.config, start.told or [say("starting from {model}", model=start.folder)], 0
    if start.config.given("vocab_size") or start.config.task.writes_text:
        return start.config, start.told, 0
    return _with_table(start.config), start.told, 0


def _with_table(config: Config) -> Config:
    """The settings with a table of embeddings that fits the data, where they are prepared or a look at them tells its size."""
    tokens = 0
    if config.data.train_file is not None:
        with suppress(UserError, NotMade):  # said where the rows are looked at
            if (data := look(config, find_prepared, config)) is not None:
                tokens = Tokenizer.load(data.tokenizer_dir).size
            elif (sample := look(config, estimate_lengths, config)) is not None:
                tokens = sample.vocabulary
    return config.changed(vocab_size=rows_for(tokens)) if tokens else config


@dataclass(frozen=True)
class _Found:
    """A run as it would be, and what else could be done."""

    spec: RunSpec
    modes: dict[str, Plan | None]
    changes: list[Alternative]
    ladder: list[RungOutcome]

    @property
    def plan(self) -> Plan:
        return self.spec.plan


def _machine(config: Config) -> Machine:
    """The machine that is named, or this one with the device that `train` would take.

    Raises:
        UserError: the machine or the device is not there.
    """
    target, budget = config.plan.target, config.memory.memory_budget
    if target != AUTO:
        return target_machine(target, budget)
    here = this_machine(budget, config.run.num_threads, weights_folder(config))
    if config.run.device == "cpu" or (config.run.device == AUTO and not may_have_gpu()):
        return here
    try:
        asked = (config.run.device, budget, weights_folder(config))
        machine: Machine = call(MACHINE, *asked, setup=prepare_environment, is_quiet=True)
    except ChildDied as death:
        print(say("planned for the CPU, as torch does not start: {error}", error=str(death)), file=sys.stderr)
        return here
    return machine if machine.device else here


def _found(config: Config, done: int, tree_bytes: int) -> _Found:
    machine = with_libraries(_machine(config), config)
    machine = replace(machine, base_bytes=machine.base_bytes + tree_bytes) if machine.base_bytes else machine
    rows = Rows.known(config, machine)
    config = config.changed(objective=rows.objective)
    try:
        spec = _counted(resolve(config, machine, rows, done=done))
    except DoesNotFit as error:
        raise DoesNotFit(*error.problems, *_assumed(rows, config)) from None
    plan_of = partial(_plan_of, spec)
    modes = dict[str, Plan | None]()
    for mode in MODES:
        try:
            modes[mode] = plan_of(spec.asked.changed(memory_mode=mode))
        except UserError:  # It does not fit, or a setting that is asked for is not possible there.
            modes[mode] = None
    changes = what_else(config, spec.plan, plan_of, MOST_CHANGES)
    return _Found(spec, modes, changes, outcomes(spec.asked, spec.work, spec.machine, spec.plan))


def _assumed(rows: Rows, config: Config) -> list[str]:
    if rows.sample is not None:
        return [
            say(
                (
                    "lengths are estimated from {sample}, with a margin; `train` plans again from all prepared rows before "
                    "step 1"
                ),
                sample=rows.sample.describe(),
            )
        ]
    if rows.lengths is not None or config.data.train_file is None or task_named(rows.objective).is_windowed:
        return []
    return [
        say(
            "data is not prepared yet, so rows are assumed to be as long as --max_seq_len={source} and "
            "--max_target_len={target} allow; after `prepare` with the same flags the plan uses their real lengths",
            source=config.data.max_seq_len, target=config.data.max_target_len,
        )
    ]  # fmt: skip


def _at_most(spec: RunSpec) -> list[str]:
    """What rows would take that are all as long as the settings allow, where the plan rests on a sample."""
    if spec.rows.sample is None:
        return []
    longest = Rows.as_set(spec.asked.data, spec.rows.objective, spec.asked.train.eval_rows)
    try:
        peak = resolve(spec.asked, spec.machine, longest).plan.peak_bytes
    except UserError:
        return [
            say(
                "it fits with these lengths; it would not if all rows were as long as --max_seq_len and --max_target_len "
                "allow, and `train` would say so"
            )
        ]
    text = "{peak} if all rows were as long as --max_seq_len and --max_target_len allow"
    return [say(text, peak=format_size(peak))]


def _counted(spec: RunSpec) -> RunSpec:
    """The run with about as many rows as its files hold, where nothing is prepared and no steps are named."""
    remarks = [*_assumed(spec.rows, spec.asked), *_at_most(spec)]
    told = "time: for about {rows} ({steps}) with the lengths of the sample; exact once the data is prepared"
    count = 0 if spec.rows.sample is None or spec.asked.train.max_steps != AUTO else spec.rows.sample.about_rows
    if spec.steps is None and (count := _about_rows(spec.asked)):
        spec = resolve(spec.asked, spec.machine, replace(spec.rows, count=count), done=spec.done)
        told = "time: for about {rows} ({steps}) of maximum length; exact once the data is prepared"
    if count:
        steps = counted(spec.counted.max_steps, "step")
        remarks.append(say(told, rows=counted(count, "row"), steps=steps))
    return replace(spec, plan=replace(spec.plan, reasons=(*spec.plan.reasons, *remarks)))


def _plan_of(spec: RunSpec, config: Config) -> Plan:
    asked = config.memory.memory_budget
    machine = spec.machine
    if asked != AUTO:
        machine = replace(machine, budget_bytes=min(machine.budget_bytes, int(asked)))
    rows = spec.rows
    is_known = rows.lengths is not None and config.data == spec.asked.data
    if rows.sample is not None:
        rows = Rows.of_sample(config, machine, rows.sample)
    elif not is_known or config.train.effective_batch_size != spec.asked.train.effective_batch_size:
        rows = Rows.known(config, machine)
    return resolve(config, machine, rows).plan


def _as_json(config: Config, found: _Found, told: list[str]) -> dict[str, Any]:
    modes = {mode: None if one is None else asdict(one) for mode, one in found.modes.items()}
    return {
        "plan": found.plan.as_dict(), "start": told, "modes": modes, "ladder": [_rung_as_json(one) for one in found.ladder],
        "alternatives": [asdict(one) for one in [Alternative.of("planned", found.plan), *found.changes]],
        "changes": [asdict(change) for change in found.changes], "machine": asdict(found.spec.machine),
        "disk": disk_need(config, found.plan.choice.storage, found.plan.choice, found.plan.seconds).as_dict(),
    }  # fmt: skip


def _rung_as_json(outcome: RungOutcome) -> dict[str, Any]:
    return {**asdict(outcome), "name": english(outcome.name)}


def _ladder_row(outcome: RungOutcome) -> tuple[str, str, str, str]:
    """The mark of the chosen rung, its name, the predicted peak, and the time of a step."""
    mark = ">" if outcome.is_chosen else " "
    time = say("{step} per step", step=_step(outcome.seconds))
    return mark, outcome.name, format_size(outcome.peak_bytes), time if outcome.fits else say("does not fit")


def _show_tables(config: Config, found: _Found) -> None:
    chosen, progress = found.plan, Progress(1)
    where = found.spec.machine.device or say("this machine") if config.plan.target == AUTO else config.plan.target
    rows = found.spec.rows
    what = say(
        "{model} on {machine}, {source} + {target} tokens ({objective})",
        model=_named(config), machine=where, source=rows.source_tokens, target=rows.target_tokens, objective=rows.objective,
    )  # fmt: skip
    title = say("fits: {what}", what=what)
    need = disk_need(config, chosen.choice.storage, chosen.choice, chosen.seconds)
    disk = need.describe()
    if config.plan.target == AUTO:  # what stands against it on this machine
        problems, notes = too_full(need, config.run.output_dir)
        if problems:
            title = say("does not fit on the disk: {what}", what=what)
        free = say("{need}; {size} free", need=disk, size=format_size(free_bytes(config.run.output_dir)))
        disk = join("; ", [*problems, *notes]) if problems or notes else free
    reopens = reopens_files(config.memory.ultra_low_mem, found.spec.machine.available_bytes)
    first, *told = plan_rows(chosen, weight_counts(config.model)["total"], reopens, disk)
    if chosen.seconds_total is None:
        untimed = say(
            "{thousand} for 1,000 steps (add --train_file or --max_steps for your run's total)",
            thousand=duration(1000 * chosen.seconds),
        )  # fmt: skip
        told = [(say("time"), untimed), *told]
    progress.table(title, [first, *told])
    progress.table(say("parts of the peak"), parts_rows(chosen))
    progress.table(say("peak by phase"), [(say(phase), format_size(size)) for phase, size in chosen.phases.items()])
    modes = [
        (f"--memory_mode={mode}", say("does not fit"), "") if one is None
        else (f"--memory_mode={mode}", format_size(one.peak_bytes), _speed(chosen, one.seconds))
        for mode, one in found.modes.items()
    ]  # fmt: skip
    progress.table(
        say("ladder: the first rung that fits is taken, unless one below it is over 5% faster"),
        [_ladder_row(one) for one in found.ladder],
    )
    progress.table(say("memory modes"), modes)
    changes = list[tuple[str, str, str]]()
    for change in found.changes:
        saves, speed_told = format_size(chosen.peak_bytes - change.peak_bytes), _speed(chosen, change.seconds)
        peak = format_size(change.peak_bytes)
        changes.append((f"--{change.label}", peak, say("{size} less, {speed}", size=saves, speed=speed_told)))
    if changes:
        progress.table(say("to use less memory"), changes)
    if seen := _rows(config):
        progress.table(say("examples exactly as the model receives them"), seen)


def _about_rows(config: Config) -> int:
    """Rows that the files give, or windows of their text; 0 where there are no files, or nobody can tell."""
    if config.data.train_file is None:
        return 0
    with suppress(UserError, OSError):
        data = look(config, find_training_data, config, only_if_made)
        if data.task.is_windowed:
            rows = about_tokens(data.sources) // lengths_of(config.data, data.objective).raw_tokens
        else:
            rows = look(config, about_rows, data.sources)
        return max(1, min(rows, config.data.max_samples or rows))
    return 0


def _named(config: Config) -> str:
    shape = config.model
    given = model_presets().get(config.model_preset, {})
    if all(getattr(shape, name) == value for name, value in given.items()):
        return config.model_preset
    return say(
        "d_model {width}, {encoder} + {decoder} blocks, vocabulary {tokens}",
        width=shape.d_model, encoder=shape.num_layers, decoder=shape.num_decoder_layers, tokens=f"{shape.vocab_size:,}",
    )  # fmt: skip


def _rows(config: Config) -> Table:
    if config.data.train_file is None:
        return []
    with suppress(UserError):
        prepared = look(config, find_prepared, config)
        if prepared is not None:
            loader = StepLoader(prepared.train_dir, prepared.objective, config)
            tokenizer = Tokenizer.load(prepared.tokenizer_dir)
            return table_of_shards(config, prepared, loader, tokenizer, SHOWN_ROWS)
        known = config.data.tokenizer_dir != AUTO
        worded = None if known else Path(config.data.cache_dir)
        return look(config, table_of_files, config, SHOWN_ROWS, only_if_made, worded)[1]
    return []


def _speed(chosen: Plan, seconds: float) -> str:
    """Steps beside those of the plan; where rows or tokens are fewer, a step is less work."""
    told = "{share} of the planned speed, about {step} per step"
    return say(told, share=f"{chosen.seconds / seconds:.0%}", step=_step(seconds))


def _step(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else say("{seconds} s", seconds=f"{seconds:.2f}")
