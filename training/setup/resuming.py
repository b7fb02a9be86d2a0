"""Whether this start continues an earlier run, which one, and with which settings.

As asked, or because a batch system has started the same command again: so the command itself has to be able to go on,
`--is_keep_training=auto`. What torchrun starts again continues the run of its first attempt without being asked to
(`training.checkpoints.runs.run_of_attempt`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from language import join, say
from run_files import SETTINGS_FILE
from settings.declared import Config, flags_of, places, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import AUTO, read_settings_file
from settings.loading import load, training_command
from settings.tasks import command_of
from training.checkpoints.runs import runs_newest_first
from training.saved_model import SHAPE_SETTINGS, TOKENIZER_SETTINGS


def goes_on(config: Config) -> bool:
    """Whether this start resumes a run."""
    wish = config.train.is_keep_training
    settings = Path(config.run.output_dir) / config.run.run_name / SETTINGS_FILE
    # A name may be too long for a file, which `Path.is_file` does not answer.
    return wish is True or (wish == AUTO and os.path.isfile(settings))


def find_run_to_resume(output_dir: str | Path, run_name: str) -> Path:
    """The folder of the run that `--is_keep_training=True` means; UserError where there is none."""
    if run_name != AUTO:
        folder = Path(output_dir) / run_name
        if not os.path.isfile(folder / SETTINGS_FILE):
            text = "--run_name = {run}, has no run to resume in {folder}; omit is_keep_training"
            raise UserError(text, run=run_name, folder=Path(output_dir))
        return folder
    runs = runs_newest_first(output_dir)
    if not runs:
        raise UserError(
            "--is_keep_training = True, there is no run in {output_dir} to resume; omit it to start one",
            output_dir=output_dir,
        )
    return runs[0].folder


def resumed_config(config: Config, run_dir: Path) -> Config:
    """The settings that a run has saved, with the flags of now over them; places are those of now alone.

    Raises:
        UserError: a flag differs in what defines the run, or its settings cannot be read.
    """
    record = _read_record(run_dir)
    command = training_command(record)
    now = config.as_dict()
    here = {name: now[name] for name in places()}
    saved = load(command, {"config": record, **here})
    flags = _flags_of_now(config)
    problems = [*_redefined(flags, saved), *_other_shape(config, saved)]
    if command != command_of(config.data.objective) != "train":
        text = "--is_keep_training = True, the run {name} was not trained on preferences; resume it with {command}"
        problems.append(say(text, name=run_dir.name, command=command))
    refuse(problems)
    this_start = {"run_name": run_dir.name, "is_keep_training": True, "overwrite": False}
    return load(command, {"config": record, **flags, **here, **this_start})


def _read_record(run_dir: Path) -> dict[str, Any]:
    """The settings that a run has saved.

    Raises:
        UserError: they cannot be read, or are of another version.
    """
    path = run_dir / SETTINGS_FILE
    try:
        record = read_settings_file(path)
    except UserError as error:
        text = "--run_name = {name}, cannot be resumed without its settings; copy {path} again, or start again with --overwrite=True"
        raise UserError(*error.problems, say(text, name=run_dir.name, path=path)) from None
    if not record.keys() <= {*settings_by_name(), "model_preset"}:
        raise UserError(
            "--run_name = {name}, was begun by another version of this program, which alone can resume it; continue "
            "from its weights with --finetune_from={folder}",
            name=run_dir.name,
            folder=run_dir,
        )
    return record


def _flags_of_now(config: Config) -> dict[str, Any]:
    """The settings that are named for this start. Where one defines the run, auto is what the run has decided."""
    of_plan = flags_of("plan").keys() - flags_of("train").keys()
    values = config.as_dict()
    flags = {
        name: value
        for name, value in values.items()
        if config.typed(name) and name not in of_plan and not (_defines(name) and value == AUTO)
    }
    if config.typed("epochs") and values["max_steps"] == AUTO:
        flags["max_steps"] = AUTO  # Else the steps that the run has decided on would go before the epochs of now.
    return flags


def _defines(name: str) -> bool:
    """Whether a setting stays as it is for all of a run."""
    return name != "model_preset" and bool(settings_by_name()[name][1].metadata["defines"])


def _redefined(flags: Mapping[str, Any], saved: Config) -> list[str]:
    """Which flags define the run otherwise than it is."""
    theirs = saved.as_dict()
    text = "--{name} = {ours}, the run to resume has {theirs}; omit it, or start another run"
    return [
        say(text, name=name, ours=value, theirs=theirs[name])
        for name, value in flags.items()
        if _defines(name) and value != theirs[name]
    ]


def _other_shape(config: Config, saved: Config) -> list[str]:
    """That a preset is named whose shape is not the run's; where the run has a base, the shape is the base's."""
    if not config.typed("model_preset") or config.model_preset == saved.model_preset:
        return []
    if saved.train.finetune_from not in (None, AUTO):
        return []
    ours = config.as_dict()
    theirs = saved.as_dict()
    shape = [name for name in SHAPE_SETTINGS if config.origin(name) == "preset" and name not in TOKENIZER_SETTINGS]
    others = [f"{name} {theirs[name]}" for name in shape if ours[name] != theirs[name]]
    if not others:
        return []
    text = "--model_preset = {model_preset}, the run to resume has a different shape ({others}); omit it, or start another run"
    return [say(text, model_preset=config.model_preset, others=join(", ", others))]


def unused_places(config: Config, run_dir: Path) -> list[str]:
    """Tell of the folders and addresses that a run has used and this start does not name."""
    saved = read_settings_file(run_dir / SETTINGS_FILE)
    return [
        say(
            "{name} = {value}: the run was started with {saved}, which counts only where it is named again",
            name=name,
            value=value,
            saved=saved[name],
        )
        for name, value in config.as_dict().items()
        if name in places() and name != "output_dir" and not config.given(name) and saved.get(name) not in (None, value)
    ]
