"""Whether this start continues an earlier run, which one, and with which settings.

The user asks for that, or a batch system starts the same command again, which has to be able to go on:
`--is_keep_training=auto`. What torchrun starts again continues the run of its first attempt, whatever the command says
(`training.checkpoints.runs.run_of_attempt`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from settings.declared import Config, RunConfig, flags_of, places, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import AUTO, read_settings_file
from settings.loading import load, training_command
from settings.tasks import command_of
from support.language import join, say
from training.checkpoints.runs import runs_newest_first
from training.report.run_files import SETTINGS_FILE
from training.saved_model import SHAPE_SETTINGS, TOKENIZER_SETTINGS

# The flags of `plan` that no run has:
PLAN_FLAGS = flags_of("plan").keys() - flags_of("train").keys()
# The settings that stay as they are for all of a run:
DEFINING = frozenset(name for name, (_, member) in settings_by_name().items() if member.metadata["defines"])


def run_to_resume(run: RunConfig, is_keep_training: bool | str, attempted: str | None = None) -> Path | None:
    """The folder of the run that this start continues; None: it begins a new one.

    Args:
        attempted: the run of an earlier attempt of this launch, which goes on whatever the settings say.
    Raises:
        UserError: a run is to be continued, and there is none.
    """
    output_dir = Path(run.output_dir)
    if attempted is not None:
        return output_dir / attempted
    # A name may be too long for a file, which `Path.is_file` does not answer.
    is_saved = os.path.isfile(output_dir / run.run_name / SETTINGS_FILE)
    if not (is_saved if is_keep_training == AUTO else is_keep_training):
        return None
    if run.run_name != AUTO:
        if is_saved:
            return output_dir / run.run_name
        text = "--run_name = {run}, has no run to resume in {folder}; omit is_keep_training"
        raise UserError(text, run=run.run_name, folder=output_dir)
    for newest in runs_newest_first(output_dir):
        return newest.folder
    raise UserError(
        "--is_keep_training = True, there is no run in {output_dir} to resume; omit it to start one",
        output_dir=output_dir,
    )


def resumed_config(config: Config, run_dir: Path) -> Config:
    """The settings that a run has saved, with the flags of now over them; places are those of now alone.

    Where a setting defines the run, auto is what the run has decided.

    Raises:
        UserError: a flag differs in what defines the run, or its settings cannot be read.
    """
    record = _read_record(run_dir)
    command = training_command(record)
    ours = config.as_dict()
    here = {name: ours[name] for name in places()}
    saved = load(command, {"config": record, **here})
    of_run = saved.as_dict()
    explicit = {name: ours[name] for name in ours if config.is_on_command_line(name) and name not in PLAN_FLAGS}
    flags = {name: value for name, value in explicit.items() if value != AUTO or name not in DEFINING}
    if ours["class_weights"] == "balanced" and of_run["class_weights"] is not None:
        flags.pop("class_weights", None)  # The run has computed them from its rows.
    if ours["finetune_from"] in (AUTO, None) or str(ours["finetune_from"]).startswith("hf://"):
        flags.pop("finetune_from", None)  # The run has decided it; a folder may be where its start lies now.
    problems: list[str] = []
    for name, value in flags.items():
        if name in DEFINING and value != of_run[name]:
            text = "--{name} = {ours}, the run to resume has {theirs}; omit it, or start another run"
            problems.append(say(text, name=name, ours=value, theirs=of_run[name]))
    if config.is_on_command_line("epochs") and ours["max_steps"] == AUTO:
        flags["max_steps"] = AUTO  # The steps that the run has saved would go before the epochs of this start.
    # Where the run has a base, the shape is the base's, and no preset's.
    is_other_preset = config.is_on_command_line("model_preset") and config.model_preset != saved.model_preset
    if is_other_preset and saved.train.finetune_from in (None, AUTO):
        differences = [
            f"{name} {of_run[name]}"
            for name in SHAPE_SETTINGS
            if name not in TOKENIZER_SETTINGS and config.origin(name) == "preset" and ours[name] != of_run[name]
        ]
        if differences:
            text = (
                "--model_preset = {model_preset}, the run to resume has a different shape ({others}); omit it, or "
                "start another run"
            )
            problems.append(say(text, model_preset=config.model_preset, others=join(", ", differences)))
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
        text = (
            "--run_name = {name}, cannot be resumed without its settings; copy {path} again, or start again with "
            "--overwrite=True"
        )
        raise UserError(*error.problems, say(text, name=run_dir.name, path=path)) from None
    if not record.keys() <= {*settings_by_name(), "model_preset"}:
        raise UserError(
            "--run_name = {name}, was begun by another version of this program, which alone can resume it; continue "
            "from its weights with --finetune_from={folder}",
            name=run_dir.name,
            folder=run_dir,
        )
    return record


def unused_places(values: Mapping[str, Any], is_set: Callable[[str], bool], run_dir: Path) -> list[str]:
    """Tell of the folders and addresses that a run has used and this start does not name.

    Args:
        values: all settings of this start. is_set: `Config.is_set`, of this start.
    """
    saved = read_settings_file(run_dir / SETTINGS_FILE)
    text = "{name} = {value}: the run was started with {saved}, which applies only if it is given again"
    return [
        say(text, name=name, value=values[name], saved=saved[name])
        for name in places()
        if name != "output_dir" and not is_set(name) and saved.get(name) not in (None, values[name])
    ]
