"""`load`: the checked settings of one command, from the defaults, `config.py`, presets, a file and flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from common.language import english, join, say
from settings.consistency import check, view
from settings.declared import (
    COMMANDS,
    GROUPS,
    ROOT,
    Config,
    flags_of,
    groups_of,
    places,
    settings_by_name,
)
from settings.edits import (
    CONFIG_FILE,
    MODEL_CLASS,
    TRAINER_FILE,
    Edit,
    Edits,
    Shipped,
    edit_of_trainer,
    edits_of_config,
)
from settings.errors import UserError, refuse
from settings.fields import AUTO, nearest
from settings.needs import without_effect
from settings.precedence import layered
from settings.program import full_name
from settings.tasks import command_of

TRAINING = ("train", "plan", "dpo")


def load(command: str, flags: Mapping[str, Any] | None = None) -> Config:
    """Build the checked configuration of one command from raw flags.

    Args:
        command: a key of `COMMANDS`.
        flags: name -> raw value, as typed; may hold `config` (a file, or what one says), `preset` and `model_preset`.
    Raises:
        UserError: all problems at once.
    """
    if command not in COMMANDS:
        raise UserError(_not_a_command(str(command)))
    command_settings = {name: frozenset(flags_of(name)) for name in COMMANDS}
    layers = layered(command, flags or {}, Config().as_dict(), settings_by_name(), command_settings, user_edits())
    problems = layers.problems
    config = Config(
        **groups_of(layers.values | _derived(layers.values, layers.origins, command)),
        model_preset=layers.model_preset,
        origins=tuple(layers.origins.items()),
        is_record=layers.is_record,
    )
    # Flags of a run that goes on stand over its saved settings, which are not read yet: `resumed_config` names their
    # file.
    if not problems and ("config" in (flags or {}) or config.train.is_keep_training is not True):
        edits = _acting_edits(layers.origins)
        wrong = [*check(config, command), *without_effect(config, _decided(command))]
        problems += [_placed(problem, edits) for problem in wrong]
    refuse(problems)
    return dataclasses.replace(config, reads=set())  # The checks alone have read something.


def _derived(values: Mapping[str, Any], origins: Mapping[str, str], command: str) -> dict[str, Any]:
    """The defaults that depend on other settings, where the user has named none."""
    settings = view(values, origins.items(), command)
    derived = dict[str, Any]()
    for name, (_, member) in settings_by_name().items():
        rule = member.metadata["derived"]
        if rule is not None and (values[name] == AUTO or not settings.given(name)):
            derived[name] = rule.value(settings)
    return derived


def _decided(command: str) -> Collection[str]:
    """The settings of a command that nothing changes after they are loaded; a trained model may say how it answers."""
    if command in TRAINING:
        return flags_of(command)
    return [name for name, (group, _) in flags_of(command).items() if group not in ("generate", "metrics")]


def _acting_edits(origins: Mapping[str, str]) -> dict[str, Edit]:
    """The edits that nothing overrides, by the name of the setting."""
    return {name: edit for name, edit in user_edits().by_name.items() if origins.get(name) == "edited"}


def _placed(problem: str, edits: Mapping[str, Edit]) -> str:
    """A contradiction, with the line in `config.py` of the setting that it is about."""
    name = english(problem).removeprefix("--").partition(" = ")[0]
    if name not in edits:
        return problem
    return say("{place}: {problem}", place=edits[name].place, problem=problem)


def _not_a_command(word: str) -> str:
    if Path(word).is_dir():
        return say(
            'load("{folder}"), names a folder; load returns the settings of a command, as in load("train", flags); '
            'for the model in this folder call {function}("{folder}")',
            folder=word,
            function=full_name("model.hf_format.load"),
        )
    return say(
        'load("{word}"), names no command; allowed: {commands}{hint}',
        word=word,
        commands=join(", ", COMMANDS),
        hint=nearest(word, COMMANDS),
    )


def training_command(saved: Mapping[str, Any]) -> str:
    """The command that a run with these saved settings was started with."""
    return command_of(saved.get("objective"))


@cache
def user_edits() -> Edits:
    """The edits in this program's own `config.py` and `trainer_low_mem.py`."""
    shipped = {"model_preset": Shipped(MODEL_CLASS, Config.model_preset)}
    for name, (group, member) in settings_by_name().items():
        shipped[name] = Shipped(getattr(GROUPS[group], "__name__", group), member.default)
    settings = edits_of_config(_text(CONFIG_FILE), shipped)
    line = edit_of_trainer(_text(TRAINER_FILE))
    if line is None:
        return settings
    return Edits({**settings.by_name, line.name: line}, settings.problems)


def label(name: str, origin: str | None) -> str:
    """A setting as the user wrote it: `--d_model`, or `config.py line 31: d_model`."""
    if origin != "edited":
        return f"--{name}"
    return say("{place}: {name}", place=user_edits().by_name[name].place, name=name)


def edit_notes(config: Config, command: str) -> list[str]:
    """Which lines edited in `config.py` act in this start, and which a named preset or a run that goes on overrides."""
    acting = list(_acting_edits(dict(config.origins)).values())
    replaced = list[Edit]()
    if config.train.is_keep_training is True:
        of_start = (*places(), "run_name", "is_keep_training")
        replaced = [edit for edit in acting if edit.name not in of_start]
        acting = [edit for edit in acting if edit.name in of_start]
    notes: list[str] = []
    if acting:
        notes.append(say("edited: {lines}", lines=_lines(acting)))
    if replaced:
        text = "edited, but a run that goes on keeps its own settings: {lines}"
        notes.append(say(text, lines=_lines(replaced)))
    for name, edit in user_edits().by_name.items():
        if config.origin(name) == "preset" and name in flags_of(command):
            text = (
                "{place}: {name} = {edited}, is overridden by {value} from a preset; --{name}={edited} takes precedence"
            )
            value = config.as_dict()[name]
            notes.append(say(text, place=edit.place, name=name, edited=edit.value, value=value))
    return notes


def _lines(edits: Iterable[Edit]) -> str:
    return ", ".join(f"{edit.name} = {edit.value} ({edit.file}:{edit.line})" for edit in edits)


def _text(name: str) -> bytes:
    path = ROOT / name
    return path.read_bytes() if path.is_file() else b""
