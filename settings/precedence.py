"""Which value does a setting take? Defaults < preset < file < flags: read, and put over each other.

`config.load` is the only caller; it knows the settings, this file knows where values come from.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from language import say
from settings.errors import UserError
from settings.fields import nearest_name, not_known, parse, read_settings_file
from settings.foreign import answer

if TYPE_CHECKING:
    from config import Config

EDITED = "edited"  # the origin of a value that goes before a preset, as somebody has put it into config.py
SHIPPED = Path(__file__).resolve().parent / "shipped.json"
PRESETS_DIR = Path(__file__).resolve().parent.parent / "presets"
Settings = Mapping[str, tuple[str, dataclasses.Field[Any]]]  # name -> its group and its field


@cache
def model_presets() -> dict[str, dict[str, Any]]:
    """The shapes of the T5 family by name, read from `presets/models.yaml`."""
    return read_settings_file(PRESETS_DIR / "models.yaml")


@cache
def _shipped() -> dict[str, Any]:
    """The defaults as they came; none where their record is not there."""
    try:
        found = json.loads(SHIPPED.read_text(encoding="utf8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def edited(defaults: Mapping[str, Any]) -> frozenset[str]:
    """Settings whose default in `config.py` is not the one that was shipped: somebody has edited it, and means it."""
    shipped = _shipped()
    return frozenset(name for name, value in defaults.items() if name in shipped and shipped[name] != value)


@cache
def run_presets() -> tuple[str, ...]:
    """Names of the presets by machine and goal: the other files of `presets/`."""
    return tuple(sorted(path.stem for path in PRESETS_DIR.glob("*.yaml") if path.stem not in ("models", "machines")))


def fill(
    config: Config, command: str, flags: Mapping[str, Any], settings: Settings, taken: Mapping[str, Collection[str]]
) -> tuple[Config, list[str]]:
    """Put preset, file and flags over the defaults of a configuration, and note in it where each value came from.

    Args:
        flags: name -> raw value, as typed; may hold `config` (a file), `preset` and `model_preset`.
        settings: all there are.
        taken: command -> names of the settings that it takes.
    Returns:
        the configuration, and what is wrong with what was given.
    """
    problems: list[str] = []
    read = _Reading(settings, problems, edited(config.as_dict()))
    layers = _layers(command, dict(flags), {group for group, _ in settings.values()}, problems)
    preset = config.model_preset
    for origin, layer in layers:
        if "model_preset" in layer:
            preset, read.origins["model_preset"] = str(layer.pop("model_preset")), origin
    for name, value in _shape(preset, problems).items():
        read.take(name, value, "preset")
    for origin, layer in layers:
        for name, value in layer.items():
            if name in taken[command]:
                read.take(name, value, origin)
            elif origin == "flag" or name not in settings:
                others = [other for other, names in taken.items() if name in names]
                known = {*taken[command], "config", "preset", "model_preset"}
                foreign = answer(name, value, known)
                near = say("; {advice}", advice=foreign) if foreign else nearest_name(name, sorted(known))
                longer = sorted(flag for flag in known if "_" in name and flag.startswith(f"{name}_"))
                if others and longer:  # which is meant, whatever other commands call by the shorter name
                    near, others = say("; did you mean --{near}?", near=longer[0]), []
                there = say(" of {command}, but of {others}", command=command, others=", ".join(others))
                told = "--{name}: no such flag{hint}" if origin == "flag" else "--{name}: no such setting{hint}"
                problems.append(say(told, name=name, hint=there if others else near))
    config = config.changed(**read.values)
    return dataclasses.replace(config, model_preset=preset, origins=tuple(read.origins.items())), problems


def _layers(
    command: str, flags: dict[str, Any], groups: set[str], problems: list[str]
) -> list[tuple[str, dict[str, Any]]]:
    """What was given, the weakest first."""
    path = flags.pop("config", None)
    file = _read(Path(str(path)), groups, problems) if path is not None else {}
    preset = flags.pop("preset", file.pop("preset", None))
    if preset is None and not (flags.get("train_file") or file.get("train_file")) and command == "train":
        preset = "sample"
    return [("preset", _preset(preset, groups, problems)), ("file", file), ("flag", flags)]


def _read(path: Path, groups: set[str], problems: list[str]) -> dict[str, Any]:
    try:
        return read_settings_file(path, groups)
    except UserError as error:
        problems += error.problems
        return {}


def _preset(name: Any, groups: set[str], problems: list[str]) -> dict[str, Any]:
    if name is None or str(name).lower() == "none":
        return {}
    if name not in run_presets():
        told = "--{name} = {value}, {problem}"
        problems.append(say(told, name="preset", value=name, problem=not_known(str(name), run_presets())))
        return {}
    return read_settings_file(PRESETS_DIR / f"{name}.yaml", groups)


def _shape(name: str, problems: list[str]) -> dict[str, Any]:
    shape = model_presets().get(name)
    if shape is None:
        told = "--{name} = {value}, {problem}"
        problems.append(say(told, name="model_preset", value=name, problem=not_known(name, model_presets())))
    return shape or {}


class _Reading:
    """Values of settings as they are read, and where each came from.

    Args:
        problems: takes what is wrong with them. edited: whose default goes before a preset.
    """

    def __init__(self, settings: Settings, problems: list[str], edited: Collection[str] = ()) -> None:
        self.settings, self.problems, self.edited = settings, problems, edited
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def take(self, name: str, value: Any, origin: str) -> None:
        """Put a raw value over what was there before."""
        if origin == "preset" and name in self.edited:
            self.origins[name] = EDITED
            return
        if _is_nested(value):  # whose text may be of any length: YAML can name one part many times
            self.problems.append(say("--{name}, is given a table; a setting has one value", name=name))
            return
        try:
            self.values[name] = parse(self.settings[name][1], value)
            self.origins[name] = origin
            if name == "epochs" and origin != "preset" and self.origins.get("max_steps") == "preset":
                del self.values["max_steps"], self.origins["max_steps"]  # which would go before them
        except ValueError as error:
            problem = error.args[0] if error.args else error
            self.problems.append(say("--{name} = {value}, {problem}", name=name, value=value, problem=problem))


def _is_nested(value: Any) -> bool:
    inner = (Mapping, list, tuple, set)
    return isinstance(value, (Mapping, set)) or (
        isinstance(value, (list, tuple)) and any(isinstance(member, inner) for member in value)
    )
