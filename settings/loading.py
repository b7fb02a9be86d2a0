"""`load`: the checked settings of one command, from the defaults, `config.py`, presets, a file and flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

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
from support.language import english, join, say

TRAINING = ("train", "plan", "dpo")


def load(command: str, flags: Mapping[str, Any] | None = None) -> Config:
    """Build the checked configuration of one command from raw flags.

    Args:
        command: a key of `COMMANDS`.
        flags: name -> raw value, as typed; may hold `config` (the path of a settings file, or a
            mapping of settings), `preset` and `model_preset`.
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
    # The flags of a resumed run change its saved settings, which are read later: `resumed_config` loads that file, and
    # checks both.
    if not problems and ("config" in (flags or {}) or config.train.is_keep_training is not True):
        edits = _effective_edits(layers.origins)
        contradictions = [*check(config, command), *without_effect(config, _final_settings(command))]
        problems += [_with_line(problem, edits) for problem in contradictions]
    refuse(problems)
    # So far only the checks have read settings, which does not count as use.
    return dataclasses.replace(config, reads=set())


def _derived(values: Mapping[str, Any], origins: Mapping[str, str], command: str) -> dict[str, Any]:
    """The defaults that depend on other settings, where the user has named none."""
    settings = view(values, origins.items(), command)
    derived = dict[str, Any]()
    for name, (_, member) in settings_by_name().items():
        rule = member.metadata["derived"]
        if rule is not None and (values[name] == AUTO or not settings.is_set(name)):
            derived[name] = rule.value(settings)
    return derived


def _final_settings(command: str) -> Collection[str]:
    """The settings of a command whose values are final once loaded. Where a trained model is used, its folder may still
    change how it answers.
    """
    if command in TRAINING:
        return flags_of(command)
    return [name for name, (group, _) in flags_of(command).items() if group not in ("generate", "metrics")]


def _effective_edits(origins: Mapping[str, str]) -> dict[str, Edit]:
    """The edits that no preset, file or flag overrides, by the name of the setting."""
    return {name: edit for name, edit in user_edits().by_name.items() if origins.get(name) == "edited"}


def _with_line(problem: str, edits: Mapping[str, Edit]) -> str:
    """A problem, which begins with the name of its setting, with the line in `config.py` where that was edited."""
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
    """The command, `train` or `dpo`, that started the run with these saved settings."""
    return command_of(saved.get("objective"))


@cache
def user_edits() -> Edits:
    """The edits in this program's own `config.py` and `trainer_low_mem.py`."""
    shipped = {"model_preset": Shipped(MODEL_CLASS, Config.model_preset)}
    for name, (group, member) in settings_by_name().items():
        shipped[name] = Shipped(getattr(GROUPS[group], "__name__", group), member.default)
    edits = edits_of_config(_content(CONFIG_FILE), shipped)
    trainer_edit = edit_of_trainer(_content(TRAINER_FILE))
    if trainer_edit is None:
        return edits
    return Edits({**edits.by_name, trainer_edit.name: trainer_edit}, edits.problems)


def label(name: str, origin: str | None) -> str:
    """A setting as the user wrote it: `--d_model`, or `config.py line 31: d_model`."""
    if origin != "edited":
        return f"--{name}"
    return say("{place}: {name}", place=user_edits().by_name[name].place, name=name)


def edit_notes(config: Config, command: str) -> list[str]:
    """Notes on the lines edited in `config.py`: which ones count in this start, and which ones are overridden, by a
    named preset or by the saved settings of a resumed run.
    """
    effective = list(_effective_edits(dict(config.origins)).values())
    overridden = list[Edit]()
    if config.train.is_keep_training is True:
        # Each start decides these anew; all else is saved in the run.
        start_settings = (*places(), "run_name", "is_keep_training")
        overridden = [edit for edit in effective if edit.name not in start_settings]
        effective = [edit for edit in effective if edit.name in start_settings]
    notes: list[str] = []
    if effective:
        notes.append(say("edited: {lines}", lines=_lines(effective)))
    if overridden:
        text = "edited, but a resumed run keeps its own settings: {lines}"
        notes.append(say(text, lines=_lines(overridden)))
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


def _content(name: str) -> bytes:
    path = ROOT / name
    return path.read_bytes() if path.is_file() else b""
