"""Whether this start continues an earlier run, which one, and with which settings.

As asked, or because a batch system has started the same command again: so the command itself has to be able to go on,
`--is_keep_training=auto`. What torchrun starts again continues the run of its first attempt without being asked to
(`training.checkpoints.runs.run_of_attempt`).
"""

from __future__ import annotations

import os
from pathlib import Path

from language import join, say
from run_files import SETTINGS_FILE
from settings.consistency import PREFERENCES
from settings.declared import Config, flags_of, places, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import AUTO, read_settings_file
from settings.loading import load, training_command
from settings.precedence import model_presets
from training.checkpoints.runs import runs_newest_first


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
    """The saved settings of a run, with the flags of now over them; places are those of now alone.

    Raises:
        UserError: a flag differs in what defines the run, or its settings cannot be read.
    """
    ours, settings = config.as_dict(), settings_by_name()
    defining = [name for name, (_, member) in settings.items() if member.metadata["defines"]]
    of_plan = {*flags_of("plan")} - {*flags_of("train")}
    named = [name for name in ours if config.typed(name) and name not in of_plan]
    # auto, where it defines the run, is what the run has decided
    flags = {name: ours[name] for name in named if not (name in defining and ours[name] == AUTO)}
    if config.typed("epochs") and ours["max_steps"] == AUTO:
        flags["max_steps"] = AUTO  # else the steps that the run has decided on would go before the epochs of now
    path = run_dir / SETTINGS_FILE
    try:
        saved = read_settings_file(path)
    except UserError as error:
        raise UserError(
            *error.problems,
            say(
                "--run_name = {name}, cannot be resumed without its settings; copy {path} again, or start again with "
                "--overwrite=True",
                name=run_dir.name,
                path=path,
            ),
        ) from None
    if any(name not in settings and name != "model_preset" for name in saved):
        raise UserError(
            "--run_name = {name}, was begun by another version of this program, which alone can resume it; continue "
            "from its weights with --finetune_from={folder}",
            name=run_dir.name,
            folder=run_dir,
        )
    command = training_command(saved)
    here = {name: ours[name] for name in places()}
    theirs = load(command, {"config": str(path), **here}).as_dict()
    problems = [
        say(
            "--{name} = {ours}, the run to resume has {theirs}; omit it, or start another run",
            name=name,
            ours=ours[name],
            theirs=theirs[name],
        )
        for name in defining
        if name in flags and ours[name] != theirs[name]
    ]
    is_other = config.typed("model_preset") and config.model_preset != theirs["model_preset"]
    if is_other and theirs["finetune_from"] in (None, AUTO):  # else the shape is the base's
        # which a tokenizer may have changed since
        of_data = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
        shape = [name for name in model_presets()[config.model_preset] if name in defining and name not in of_data]
        if others := [f"{name} {theirs[name]}" for name in shape if ours[name] != theirs[name] and name not in named]:
            problems.append(
                say(
                    "--model_preset = {model_preset}, the run to resume has a different shape ({others}); omit it, or "
                    "start another run",
                    model_preset=config.model_preset,
                    others=join(", ", others),
                )
            )
    if config.data.objective == PREFERENCES and command != "dpo":
        problems.append(
            say(
                "--is_keep_training = True, the run {name} was not trained on preferences; resume it with {command}",
                name=run_dir.name,
                command=command,
            )
        )
    refuse(problems)
    now = {"run_name": run_dir.name, "is_keep_training": True, "overwrite": False}
    return load(command, {"config": str(path), **flags, **here, **now})


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
