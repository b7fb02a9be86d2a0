"""Layers of settings: default < preset that nobody named < saved model < line edited in `config.py` < named preset <
file < flags.

What a saved model says is known only once it is found: `Config.with_saved` puts it into its layer.

The settings themselves are declared in `settings/declared.py`; this file takes their table and never imports it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from settings.edits import Edits
from settings.errors import UserError
from settings.fields import TRUE_WORDS, nearest, not_known, parse, read_settings_file
from support.language import join, say

ROOT = Path(__file__).resolve().parent.parent
PRESETS_DIR = ROOT / "presets"
ALIASES_FILE = Path(__file__).resolve().parent / "aliases.yaml"
# A value of a preset -> the settings that say the same otherwise, and go before it where all of them are named above
# it.
GIVES_WAY = {
    "max_steps": ("epochs",),
    "effective_batch_size": ("batch_size_per_gpu", "gradient_accumulation_steps"),
}
# Where the value of a setting can be from, the weakest first. The presets that nobody names are `tiny` and `sample`.
ORIGINS = ("unnamed preset", "saved model", "edited", "preset", "file", "flag")
UNNAMED_PRESET, SAVED = ORIGINS[:2]
BY_USER = ("edited", "file", "flag")  # The user chose what comes from there.
Settings = Mapping[str, tuple[str, dataclasses.Field[Any]]]  # name -> its group and its field


class Layered(NamedTuple):
    """All settings, from which layer each came that is not the default, and what is wrong.

    Args:
        is_record: whether the file is what a run has saved, which names all settings, chosen or not.
    """

    values: dict[str, Any]
    model_preset: str
    origins: dict[str, str]
    problems: list[str]
    is_record: bool


class Layer(NamedTuple):
    """Raw values by flat name, and where they are from: one of `ORIGINS`."""

    origin: str
    values: dict[str, Any]


@cache
def model_presets() -> dict[str, dict[str, Any]]:
    """The shapes of the T5 family by name, read from `presets/models.yaml`."""
    return read_settings_file(PRESETS_DIR / "models.yaml")


@cache
def run_presets() -> tuple[str, ...]:
    """Names of the presets by machine and goal: the other files of `presets/`."""
    return tuple(sorted(path.stem for path in PRESETS_DIR.glob("*.yaml") if path.stem not in ("models", "machines")))


def layered(
    command: str,
    flags: Mapping[str, Any],
    defaults: Mapping[str, Any],
    settings: Settings,
    command_settings: Mapping[str, Collection[str]],
    edits: Edits,
) -> Layered:
    """Put presets, edited lines, file and flags over each other.

    Args:
        flags: name -> raw value, as typed; may hold `config` (a file, or what one says), `preset` and `model_preset`.
        defaults: as declared. settings: all there are. command_settings: command -> names of the settings it takes.
        edits: the lines of `config.py` that the user has changed.
    """
    flags = dict(flags)
    problems = list(edits.problems)
    groups = {group for group, _ in settings.values()}
    file = _file(flags.pop("config", None), groups, problems)
    is_record = 2 * len(file) > len(settings)
    preset = flags.pop("preset", file.pop("preset", None))
    edited = {name: edit.value for name, edit in edits.by_name.items()}
    has_data = any(layer.get("train_file") for layer in (edited, file, flags))
    unnamed = "sample" if preset is None and command == "train" and not has_data else None
    layers = [
        Layer(UNNAMED_PRESET, _preset(unnamed, groups, problems)),
        Layer("edited", edited),
        Layer("preset", _preset(preset, groups, problems)),
        Layer("file", file),
        Layer("flag", flags),
    ]
    values = dict(defaults)
    origins = dict[str, str]()
    model_preset = str(defaults["model_preset"])
    for layer in layers:
        if "model_preset" in layer.values:
            model_preset = str(layer.values.pop("model_preset"))
            origins["model_preset"] = layer.origin
    if model_preset not in model_presets():
        problems.append(_unknown_preset("model_preset", model_preset, model_presets()))
    preset_origin = origins.get("model_preset", UNNAMED_PRESET)
    shape_origin = UNNAMED_PRESET if preset_origin == UNNAMED_PRESET else "preset"
    shape = Layer(shape_origin, dict(model_presets().get(model_preset, {})))
    # The shape of a preset that a named preset, the file or a flag names stands over edited lines.
    layers.insert(2 if preset_origin in ("preset", "file", "flag") else 0, shape)
    for layer in layers:
        are_alike = values["num_layers"] == values["num_decoder_layers"]
        for name, value in layer.values.items():
            is_taken = layer is shape or name in command_settings[command]
            if not is_taken and (layer.origin == "flag" or name not in settings):  # A file may serve several commands.
                problems.append(_no_such(name, value, layer.origin, command, command_settings))
            elif is_taken and isinstance(value, (Mapping, list, tuple, set)):
                # Its text may be of any length: YAML can name one part many times.
                problems.append(say("--{name}, is a table; a setting takes one value", name=name))
            elif is_taken:
                try:
                    values[name] = parse(settings[name][1], value)
                    origins[name] = layer.origin
                except ValueError as error:
                    if layer.origin == "edited":
                        problems.append(edits.by_name[name].problem(error.args[0]))
                    else:
                        text = "--{name} = {value}, {problem}"
                        problems.append(say(text, name=name, value=value, problem=error.args[0]))
        if are_alike and "num_layers" in layer.values and "num_decoder_layers" not in layer.values:
            # Named alone, it means both stacks, as in transformers' T5Config; ByT5's differ, and its decoder stays.
            values["num_decoder_layers"] = values["num_layers"]
    for name, substitutes in GIVES_WAY.items():
        is_of_preset = origins.get(name) in (UNNAMED_PRESET, "preset")
        if is_of_preset and all(strength(origins.get(other)) > strength(origins[name]) for other in substitutes):
            values[name] = defaults[name]
            del origins[name]
    return Layered(values, model_preset, origins, problems, is_record)


def strength(origin: str | None) -> int:
    """The higher, the more other layers a value from there stands over; None: the default."""
    return 0 if origin is None else 1 + ORIGINS.index(origin)


def _file(config: Any, groups: Collection[str], problems: list[str]) -> dict[str, Any]:
    """The settings of `--config`: a file, or what one says."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    try:
        return read_settings_file(Path(str(config)), groups)
    except UserError as error:
        problems += error.problems
        return {}


def _preset(name: Any, groups: Collection[str], problems: list[str]) -> dict[str, Any]:
    if name is None or str(name).lower() == "none":
        return {}
    if name not in run_presets():
        problems.append(_unknown_preset("preset", name, run_presets()))
        return {}
    return read_settings_file(PRESETS_DIR / f"{name}.yaml", groups)


def _unknown_preset(setting: str, name: Any, presets: Collection[str]) -> str:
    return say("--{name} = {value}, {problem}", name=setting, value=name, problem=not_known(str(name), presets))


def _no_such(name: str, value: Any, origin: str, command: str, command_settings: Mapping[str, Collection[str]]) -> str:
    """What is said of a name that is no setting of a command: what the user most likely meant."""
    allowed = {*command_settings[command], "config", "preset", "model_preset"}
    commands = [other for other, names in command_settings.items() if name in names]
    longer = sorted(flag for flag in allowed if "_" in name and flag.startswith(f"{name}_"))
    advice = alias(f"{command}.{name}", value, allowed) or alias(name, value, allowed)
    hint: str
    if commands and advice:
        hint = say(" of {command}; {advice}", command=command, advice=advice)
    elif commands and longer:  # A longer name is meant, whatever other commands call by the shorter one.
        hint = say("; did you mean --{near}?", near=longer[0])
    elif commands:
        hint = say(" for {command}, only for {others}", command=command, others=join(", ", commands))
    elif advice:
        hint = say("; {advice}", advice=advice)
    else:
        hint = nearest(name, sorted(allowed), "; did you mean --{near}?")
        hint = hint or say("; see --help for the flags that exist")
    text = "--{name}: no such flag{hint}" if origin == "flag" else "--{name}: no such setting{hint}"
    return say(text, name=name, hint=hint)


@cache
def aliases() -> dict[str, Any]:
    """What to write for flags of other programs; `aliases.yaml` says how it is read."""
    return read_settings_file(ALIASES_FILE)


def alias(name: str, value: object, allowed: Collection[str]) -> str:
    """What to write for a flag of another program; empty where it is not known, or the command has no such setting.

    Args:
        value: as it was typed. allowed: the settings of the command.
    """
    entry: str | list[str] | dict[str, str] = aliases().get(name, "")
    typed = str(value) if isinstance(value, (str, int, float)) else ""  # A table may be of any length.
    if isinstance(entry, dict):
        word = typed.lower()
        entry = entry.get("true" if word in (*TRUE_WORDS, "") else word) or entry["else"]
    if isinstance(entry, str) and " " in entry:
        if not all(flag in allowed for flag in re.findall(r"--(\w+)", entry)):
            return ""
        verb, _, flags = entry.partition(" ")
        if verb == "write" and " " not in flags:
            return say("write {flags}", flags=flags.format(value=typed))
        return say(entry)
    names = entry if isinstance(entry, list) else [entry]
    setting = next((name for name in names if name in allowed), "")
    return say("here it is --{flag}={value}", flag=setting, value=typed or "VALUE") if setting else ""
