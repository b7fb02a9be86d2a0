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

from common.language import join, say
from settings.edits import Edits
from settings.errors import UserError
from settings.fields import TRUE_WORDS, nearest, not_known, parse, read_settings_file

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
BY_USER = ("edited", "file", "flag")  # origins of what the user chose
Settings = Mapping[str, tuple[str, dataclasses.Field[Any]]]  # name -> its group and its field


class Layered(NamedTuple):
    """Values that are not the defaults, from which layer each came, and what is wrong.

    Args:
        is_record: whether the file is what a run has saved, which names all settings, chosen or not.
    """

    values: dict[str, Any]
    model_preset: str
    origins: dict[str, str]
    problems: list[str]
    is_record: bool


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
    taken: Mapping[str, Collection[str]],
    edits: Edits,
) -> Layered:
    """Put presets, edited lines, file and flags over each other.

    Args:
        flags: name -> raw value, as typed; may hold `config` (a file, or what one says), `preset` and `model_preset`.
        defaults: as declared. settings: all there are. taken: command -> names of the settings that it takes.
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
    merged = Merged(dict(defaults), {}, {})
    model_preset = str(defaults["model_preset"])
    model_layer = Layer(UNNAMED_PRESET, {})
    place = 0  # The shape of a preset that a named preset, the file or a flag names stands over edited lines.
    for number, layer in enumerate(layers):
        if "model_preset" in layer.values:
            model_preset = str(layer.values.pop("model_preset"))
            merged.origins["model_preset"] = layer.origin
            model_layer = Layer(UNNAMED_PRESET if layer.origin == UNNAMED_PRESET else "preset", {})
            place = 2 if number >= 2 else 0
    if model_preset in model_presets():
        model_layer.values.update(model_presets()[model_preset])
    else:
        problems.append(_unknown_preset("model_preset", model_preset, model_presets()))
    layers.insert(place, model_layer)
    for number, layer in enumerate(layers):
        known = settings if layer is model_layer else taken[command]
        values = dict[str, Any]()
        for name, value in layer.values.items():
            if name in known:
                values[name] = value
            elif layer.origin == "flag" or name not in settings:  # A file may serve several commands.
                problems.append(_no_such(name, value, layer.origin, command, taken))
        merged.put(Layer(layer.origin, values), number, settings, edits, problems)
    for name, others in GIVES_WAY.items():
        is_of_preset = merged.origins.get(name) in (UNNAMED_PRESET, "preset")
        if is_of_preset and all(merged.levels.get(other, -1) > merged.levels[name] for other in others):
            del merged.origins[name]
            del merged.levels[name]
    values = {name: merged.values[name] for name in merged.levels}
    return Layered(values, model_preset, merged.origins, problems, is_record)


class Layer(NamedTuple):
    """Raw values by flat name, and where they are from: one of `ORIGINS`."""

    origin: str
    values: dict[str, Any]


class Merged(NamedTuple):
    """The layers put so far over each other.

    Args:
        values: of all settings. origins: of the layer that each value is from. levels: its number.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    levels: dict[str, int]

    def put(self, layer: Layer, number: int, settings: Settings, edits: Edits, problems: list[str]) -> None:
        """Put a layer over these; what is no value of its setting is one of the problems."""
        are_alike = self.values["num_layers"] == self.values["num_decoder_layers"]
        for name, value in layer.values.items():
            if isinstance(value, (Mapping, list, tuple, set)):
                # Its text may be of any length: YAML can name one part many times.
                problems.append(say("--{name}, is a table; a setting takes one value", name=name))
                continue
            try:
                self.values[name] = parse(settings[name][1], value)
            except ValueError as error:
                if layer.origin == "edited":
                    problems.append(edits.by_name[name].problem(error.args[0]))
                else:
                    problems.append(say("--{name} = {value}, {problem}", name=name, value=value, problem=error.args[0]))
                continue
            self.origins[name] = layer.origin
            self.levels[name] = number
        if are_alike and "num_layers" in layer.values and "num_decoder_layers" not in layer.values:
            # Named alone, it means both stacks, as in transformers' T5Config; ByT5's differ, and its decoder stays.
            self.values["num_decoder_layers"] = self.values["num_layers"]
            self.levels["num_decoder_layers"] = number


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


def _unknown_preset(setting: str, name: Any, known: Collection[str]) -> str:
    told = "--{name} = {value}, {problem}"
    return say(told, name=setting, value=name, problem=not_known(str(name), known))


def _no_such(name: str, value: Any, origin: str, command: str, taken: Mapping[str, Collection[str]]) -> str:
    """What is said of a name that is no setting of a command: what the user most likely meant."""
    known = {*taken[command], "config", "preset", "model_preset"}
    others = [other for other, names in taken.items() if name in names]
    longer = sorted(flag for flag in known if "_" in name and flag.startswith(f"{name}_"))
    meant = alias(f"{command}.{name}", value, known) or alias(name, value, known)
    if others and meant:
        hint: str = say(" of {command}; {advice}", command=command, advice=meant)
    elif others and not longer:
        hint = say(" for {command}, only for {others}", command=command, others=join(", ", others))
    elif others:  # a longer name is meant, whatever other commands call by the shorter one
        hint = say("; did you mean --{near}?", near=longer[0])
    elif meant:
        hint = say("; {advice}", advice=meant)
    else:
        hint = nearest(name, sorted(known), "; did you mean --{near}?") or say("; see --help for the flags that exist")
    told = "--{name}: no such flag{hint}" if origin == "flag" else "--{name}: no such setting{hint}"
    return say(told, name=name, hint=hint)


@cache
def aliases() -> dict[str, Any]:
    """What to write for flags of other programs; `aliases.yaml` says how it is read."""
    return read_settings_file(ALIASES_FILE)


def alias(name: str, value: object, known: Collection[str]) -> str:
    """What to write for a flag of another program; empty where it is not known, or the command has no such setting.

    Args:
        value: as it was typed. known: the settings of the command.
    """
    meant: str | list[str] | dict[str, str] = aliases().get(name, "")
    typed = str(value) if isinstance(value, (str, int, float)) else ""  # a table may be of any length
    if isinstance(meant, dict):
        word = typed.lower()
        meant = meant.get("true" if word in (*TRUE_WORDS, "") else word) or meant["else"]
    if isinstance(meant, str) and " " in meant:
        if not all(flag in known for flag in re.findall(r"--(\w+)", meant)):
            return ""
        verb, _, flags = meant.partition(" ")
        if verb == "write" and " " not in flags:
            return say("write {flags}", flags=flags.format(value=typed))
        return say(meant)
    ours = next((setting for setting in (meant if isinstance(meant, list) else [meant]) if setting in known), "")
    return say("here it is --{flag}={value}", flag=ours, value=typed or "VALUE") if ours else ""
