"""Stage 6 of the setup: the last checks, then the run's folder is made or reopened.

No earlier stage writes anything for the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from memory.estimate.disk import disk_need, too_full
from model.formats.answering import keep_answer_list
from model.formats.headers import TensorHeaders
from model.shapes import weight_counts
from settings.errors import refuse
from settings.fields import AUTO, counted
from support.language import say
from support.storage import atomic_file, folder_bytes, writing
from support.units import format_size
from training.checkpoints.folder import Checkpoints
from training.checkpoints.run_lock import RunLock
from training.checkpoints.runs import create_run, note_attempt, resume_run
from training.report.run_files import SETTINGS_FILE
from training.setup.hub import create_repository
from training.setup.resolved import ResolvedRun
from training.setup.schedules import long_run_rate

FEW_STEPS = 200  # Training from random weights gives nothing useful in fewer steps.
USEFUL_STEPS = 1000  # The number of steps that the warning proposes instead.
RATE_TOLERANCE = 1.05  # A learning rate up to this factor above the stable maximum gives no warning.
FLOAT32_BYTES = 3  # A file with at least so many bytes a weight holds float32 (4), not bfloat16 or float16 (2).


def commit(run: ResolvedRun, lock: RunLock, overrides: Mapping[str, Any]) -> list[str]:
    """Check the disk, create the Hugging Face Hub repository if one is asked for, then make or reopen the run's folder.

    Args:
        overrides: settings that are saved in the run's folder with these values instead of those that the run uses.
    Returns:
        warnings, for the log.
    Raises:
        UserError: the disk has no room, or the folder cannot be written.
    """
    notes = [*start_notes(run), *run.group.run_on_main(partial(_check_disk, run))]
    if run.config.run.push_to_hub is not None:
        run.group.run_on_main(partial(create_repository, run.config.run.push_to_hub))
    run.group.run_on_main(partial(_open_folder, run, lock, overrides))
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


def start_notes(run: ResolvedRun) -> Iterator[str]:
    """Notes for the log before the first step: where a resumed run continues, and settings that may surprise the user.

    These are too few steps, a narrower storage dtype than that of the model's file, and an unstable learning rate.
    """
    config = run.spec.config
    steps = run.spec.run_steps
    storage = run.spec.plan.choice.storage
    total = counted(steps.max_steps, "step")
    if run.is_resumed:
        text = "{run} continues after step {step} of {total}"
        yield say(text, run=run.config.run.run_name, step=f"{run.state.step:,}", total=total)
    elif run.start is None:  # The run begins with random weights.
        if config.train.max_steps == config.train.epochs == AUTO and steps.max_steps < FEW_STEPS:
            text = "{steps} are too few to train from random weights; --max_steps={more} repeats the same data"
            yield say(text, steps=total, more=USEFUL_STEPS)
    elif config.memory.mixed_precision == AUTO and config.memory.memory_mode != "ultra" and not config.lora.lora_rank:
        file_bytes = TensorHeaders(run.start.base).file_bytes
        if storage != "float32" and file_bytes >= FLOAT32_BYTES * weight_counts(config.model)["total"]:
            text = (
                "{model} is stored in float32 ({size}); this run trains, saves and publishes it in {storage}, at half "
                "the size; --mixed_precision=no keeps float32"
            )
            yield say(text, model=run.base, size=format_size(file_bytes), storage=storage)
    # The bound on the learning rate is for updates that are relative to a weight's size. Those of adamw are not, and
    # adapters have a matrix that begins at zero.
    if config.train.optimizer == "adamw" or config.lora.lora_rank:
        return
    stable_rate = long_run_rate(steps.lr_schedule, steps.warmup_steps, steps.max_steps)
    if steps.learning_rate > RATE_TOLERANCE * stable_rate:
        text = (
            "a learning rate of {rate} over {steps} can make the weights diverge; --learning_rate={most} is the "
            "stable maximum for this schedule ({schedule})"
        )
        rate = f"{steps.learning_rate:.2g}"
        yield say(text, rate=rate, steps=total, most=f"{stable_rate:.2g}", schedule=steps.lr_schedule)


def _check_disk(run: ResolvedRun) -> list[str]:
    """Refuse the run if its first checkpoint does not fit on the disk; notes if only later ones do not."""
    if run.state.step >= run.spec.run_steps.max_steps:
        return []  # All steps are done; the model is only published, which takes no more disk space.
    output_dir = run.config.run.output_dir
    choice = run.spec.plan.choice
    need = disk_need(run.config, choice.storage, choice)
    with writing("output_dir", output_dir):
        problems, notes = too_full(need, output_dir, folder_bytes(run.run_dir / "checkpoints"))
    refuse(problems)
    return notes


def _open_folder(run: ResolvedRun, lock: RunLock, overrides: Mapping[str, Any]) -> None:
    config = run.config
    # A tokenizer folder inside one of this run's checkpoints is deleted with that checkpoint.
    if Path(config.data.tokenizer_dir).resolve().is_relative_to((run.run_dir / "checkpoints").resolve()):
        overrides = {**overrides, "tokenizer_dir": AUTO}
    if config.train.is_keep_training:
        resume_run(run.run_dir)
        with writing("output_dir", config.run.output_dir):
            with atomic_file(run.run_dir / SETTINGS_FILE) as settings_file:
                config.save(settings_file, **overrides)
            Checkpoints(run.run_dir, config.train.keep_latest_n_ckp).finish_last_save()
    else:
        refuse(lock.acquire(run.run_dir))
        create_run(
            config.run.output_dir,
            config.run.run_name,
            run.task.run_kind(config.train.is_finetune),
            overwrite=config.run.overwrite,
            fill=lambda folder: config.save(folder / SETTINGS_FILE, **overrides),
            objective=run.prepared.objective,
        )
    with writing("output_dir", config.run.output_dir):
        if run.answers is not None:
            keep_answer_list(run.run_dir, run.answers.folder)
        lock.write_owner()
