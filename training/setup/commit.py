"""Stage 6: what is checked last, and the run's folder, made or reopened. Nothing was written for the run before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.language import say
from common.storage import atomic_file, folder_bytes, writing
from common.units import format_size
from memory.estimate.disk import disk_need, too_full
from model.formats.answering import keep_answer_list
from model.formats.headers import TensorHeaders
from model.shapes import weight_counts
from settings.errors import refuse
from settings.fields import AUTO, counted
from training.checkpoints.folder import Checkpoints
from training.checkpoints.run_lock import RunLock
from training.checkpoints.runs import create_run, note_attempt, resume_run
from training.report.run_files import SETTINGS_FILE
from training.setup.hub import create_repository
from training.setup.resolved import ResolvedRun
from training.setup.schedules import long_run_rate

FEW_STEPS = 200  # Random weights learn too little in fewer.
USEFUL_STEPS = 1000  # This is proposed instead of too few.
ABOVE_BOUND = 1.05  # Below this factor on the rate that weights bear, nothing is said.
WIDE_BYTES = 3  # A file with more bytes a weight holds float32: in bfloat16 or float16 it would have two.


def commit(run: ResolvedRun, lock: RunLock, record: Mapping[str, Any]) -> list[str]:
    """Check disk and the hub's repository, then make the run's folder, or reopen it.

    Args:
        record: settings that the folder keeps with another value than the run has.
    Returns:
        warnings, for the log.
    Raises:
        UserError: the disk has no room, or the folder cannot be written.
    """
    notes = [*warnings_of(run), *run.group.run_on_main(partial(_room_on_disk, run))]
    if run.config.run.push_to_hub is not None:
        run.group.run_on_main(partial(create_repository, run.config.run.push_to_hub))
    run.group.run_on_main(partial(_open_folder, run, lock, record))
    if run.group.is_first_here:
        note_attempt(run.run_dir)
    if lock.warning:
        notes.append(lock.warning)
    return notes


def headline(run: ResolvedRun) -> str:
    """What is trained, on what, in one line."""
    return say(
        "{run}: {rows} ({objective}), {steps}, {device}, {processes}; {budget}",
        run=run.config.run.run_name,
        rows=counted(run.loader.num_rows, "row"),
        objective=run.spec.rows.objective,
        steps=counted(run.spec.run_steps.max_steps, "step"),
        device=run.device.describe(),
        processes=counted(run.group.size, "process"),
        budget=run.budget.describe(),
    )


def warnings_of(run: ResolvedRun) -> Iterator[str]:
    """What is to be told of a run before its first step: where it goes on, and what its settings may do that nobody has
    asked for.
    """
    config = run.spec.config
    steps = run.spec.run_steps
    storage = run.spec.plan.choice.storage
    total = counted(steps.max_steps, "step")
    if run.is_resumed:
        text = "{run} continues after step {step} of {total}"
        yield say(text, run=run.config.run.run_name, step=f"{run.state.step:,}", total=total)
    elif run.start is None:
        if config.train.max_steps == config.train.epochs == AUTO and steps.max_steps < FEW_STEPS:
            text = "{steps} are too few to train from random weights; --max_steps={more} repeats the same data"
            yield say(text, steps=total, more=USEFUL_STEPS)
    elif config.memory.mixed_precision == AUTO and config.memory.memory_mode != "ultra" and not config.lora.lora_rank:
        file_bytes = TensorHeaders(run.start.base).file_bytes
        if storage != "float32" and file_bytes >= WIDE_BYTES * weight_counts(config.model)["total"]:
            text = (
                "{model} is stored in float32 ({size}); this run trains, saves and publishes it in {storage}, at half "
                "the size; --mixed_precision=no keeps float32"
            )
            yield say(text, model=run.base, size=format_size(file_bytes), storage=storage)
    # The steps of adamw do not go with a weight's size, and the matrices of adapters begin at zero.
    if config.train.optimizer == "adamw" or config.lora.lora_rank:
        return
    stable_rate = long_run_rate(steps.lr_schedule, steps.warmup_steps, steps.max_steps)
    if steps.learning_rate > ABOVE_BOUND * stable_rate:
        text = (
            "a learning rate of {rate} over {steps} can make the weights diverge; --learning_rate={most} is the "
            "stable maximum for this schedule ({schedule})"
        )
        rate = f"{steps.learning_rate:.2g}"
        yield say(text, rate=rate, steps=total, most=f"{stable_rate:.2g}", schedule=steps.lr_schedule)


def _room_on_disk(run: ResolvedRun) -> list[str]:
    if run.state.step >= run.spec.run_steps.max_steps:
        return []  # What is left is published, which takes no room.
    output_dir = run.config.run.output_dir
    choice = run.spec.plan.choice
    with writing("output_dir", output_dir):
        problems, notes = too_full(
            disk_need(run.config, choice.storage, choice), output_dir, folder_bytes(run.run_dir / "checkpoints")
        )
    refuse(problems)
    return notes


def _open_folder(run: ResolvedRun, lock: RunLock, record: Mapping[str, Any]) -> None:
    config = run.config
    if Path(config.data.tokenizer_dir).resolve().is_relative_to((run.run_dir / "checkpoints").resolve()):
        record = {**record, "tokenizer_dir": AUTO}  # The checkpoint that lends its own will go.
    if config.train.is_keep_training:
        resume_run(run.run_dir)
        with writing("output_dir", config.run.output_dir):
            with atomic_file(run.run_dir / SETTINGS_FILE) as fresh:
                config.save(fresh, **record)
            Checkpoints(run.run_dir, config.train.keep_latest_n_ckp).finish_last_save()
    else:
        refuse(lock.acquire(run.run_dir))
        create_run(
            config.run.output_dir,
            config.run.run_name,
            run.task.run_kind(config.train.is_finetune),
            overwrite=config.run.overwrite,
            fill=lambda folder: config.save(folder / SETTINGS_FILE, **record),
            objective=run.prepared.objective,
        )
    with writing("output_dir", config.run.output_dir):
        if run.answers is not None:
            keep_answer_list(run.run_dir, run.answers.folder)
        lock.write_owner()
