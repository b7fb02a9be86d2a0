"""Writes `docs/settings.md`, its JSON Schema and the plain values of `config.py` from `settings/declared.py`.

`python docs/make_settings.py` writes them again.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # run as a script, Python would look beside this file only

from settings.declared import COMMANDS, GROUPS, Config, flags_of, settings_by_name  # noqa: E402
from settings.edits import MODEL_CLASS, TRAIN_CLASS  # noqa: E402
from settings.fields import allowed, declared, show  # noqa: E402
from settings.precedence import model_presets, run_presets  # noqa: E402

HEAD = """# Settings

Made from `settings/declared.py` by `python docs/make_settings.py`; change it there.

Every setting is a flag (`--name=value`) and a line of a YAML or JSON file (`--config=FILE`).
A line edited in `config.py` is another default. Precedence: defaults < a preset that nobody named < a saved model < lines edited in
`config.py` < a named preset < file < flags. Booleans may be written True, False, yes, no, on, off, 1, 0; sizes 6G, 512M, 1.5GiB
or bytes (1 G = 1024^3). `python train_low_mem.py COMMAND --help` shows the same in a terminal.
A setting marked • defines the run: a resumed run keeps its value, and another value is refused.
"""

LINE_WIDTH = 120
CONFIG_HEAD = '''"""Settings to edit: all of them with their defaults, in the classes that the guides name.

Change a line, add one, or paste a class from a guide at the end; `TrainConfig` takes every setting but the model's. An
edited line overrides a trained model and the presets that you did not name. A preset that you name (`--preset`,
`--model_preset`), a file (`--config=FILE`) and flags override an edited line. `python train_low_mem.py plan` shows the
values in effect. docs/settings.md lists the values that each setting may have.

This file is read as text, not run (`settings/edits.py`). In Python: `from config import load`.
"""

from settings.declared import Config
from settings.declared import declared_class as declared
from settings.errors import DoesNotFit, UserError
from settings.loading import load

__all__ = ["Config", "DoesNotFit", "T5ModelConfig", "TrainConfig", "UserError", "load"]'''


def settings_page() -> str:
    """The text of `docs/settings.md`."""
    lines = [
        HEAD,
        f"- `--preset`: settings by machine and goal, one of {', '.join(f'`{name}`' for name in run_presets())}.",
        "  `train` without `train_file` takes `sample`.",
        f"- `--model_preset`: the shape of the model, one of {', '.join(f'`{name}`' for name in model_presets())}.",
    ]
    taken_by = {command: set(flags_of(command)) for command in COMMANDS}
    for group, cls in GROUPS.items():
        assert isinstance(cls, type) and dataclasses.is_dataclass(cls)
        lines += ["", f"## {group}", "", (cls.__doc__ or "").split("\n")[0], ""]
        lines += ["| setting | default | allowed | what it does | commands |", "|---|---|---|---|---|"]
        for member in map(declared, dataclasses.fields(cls)):
            commands = ", ".join(command for command, flags in taken_by.items() if member.name in flags)
            default = "none" if member.default is None else show(member, member.default)
            if member.metadata["derived"] is not None:
                default += f"; {member.metadata['derived'].text}"
            name = f"`{member.name}`" + (" •" if member.metadata["defines"] else "")
            about = member.metadata["help"]
            if member.metadata["needs"]:
                about += f" (needs {', '.join(map(str, member.metadata['needs']))})"
            cells = (name, default, allowed(member.metadata), about, commands)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def schema() -> str:
    """The text of `docs/settings.schema.json`, by which an editor completes and checks a file of settings."""
    properties: dict[str, Any] = {
        "preset": {"type": "string", "enum": list(run_presets()), "description": "settings by machine and goal"},
        "model_preset": {
            "type": "string",
            "enum": list(model_presets()),
            "description": "shape of the model",
            "default": Config.model_preset,
        },
    }
    for group, cls in GROUPS.items():
        assert isinstance(cls, type) and dataclasses.is_dataclass(cls)
        members = {member.name: _property(member) for member in map(declared, dataclasses.fields(cls))}
        inner = {"type": "object", "properties": members, "additionalProperties": False}
        for member in map(declared, dataclasses.fields(cls)):
            properties[member.name] = members[member.name]
        properties |= {group: {**inner, "description": (cls.__doc__ or "").split("\n")[0]}}
    # a group that is called like a setting may be either
    for name in {name for name in GROUPS if name in settings_by_name()}:
        members = {member.name: _property(member) for member in map(declared, dataclasses.fields(GROUPS[name]))}  # type: ignore[arg-type]
        inner = {"type": "object", "properties": members, "additionalProperties": False}
        properties[name] = {"anyOf": [inner, _property(settings_by_name()[name][1])]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "FrugalT5 settings", "type": "object"}
    return (
        json.dumps({**head, "properties": properties, "additionalProperties": False}, indent=1, ensure_ascii=False)
        + "\n"
    )


def _property(member: dataclasses.Field[Any]) -> dict[str, Any]:
    """One setting; sizes are written as texts or numbers."""
    facts = member.metadata
    kinds = {bool: ["boolean"], int: ["integer"], float: ["number"], "size": ["string", "integer"]}
    types = [*kinds.get(facts["kind"], ["string"]), *(["null"] if facts["optional"] else [])]
    told: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
    bounds = {"minimum": facts["low"], "maximum": facts["high"], "exclusiveMinimum": facts["above"]}
    told |= {name: value for name, value in bounds.items() if value is not None}
    if facts["choices"]:
        told["enum"] = [*facts["choices"], *([None] if facts["optional"] else [])]
    text = {
        "description": f"{facts['help']}" + (f" ({facts['unit']})" if facts["unit"] else ""),
        "default": member.default,
    }
    if not facts["auto"] or ("string" in types and "enum" not in told):
        return {**told, **text}
    return {"anyOf": [told, {"const": "auto"}], **text}


def plain_values() -> str:
    """The text of `config.py`: every setting with its default, in the class that guides name."""
    lines = [CONFIG_HEAD]
    for cls in sorted(GROUPS.values(), key=lambda cls: getattr(cls, "__name__", "") not in (MODEL_CLASS, TRAIN_CLASS)):
        assert isinstance(cls, type)
        about = (cls.__doc__ or "").split("\n")[0]
        lines += ["", "", "@declared", f"class {cls.__name__}:", f'    """{about}"""', ""]
        if cls.__name__ == MODEL_CLASS:
            lines += [
                f"    model_preset = {json.dumps(Config.model_preset)}  # its shape replaces all lines below but "
                f"those that are edited"
            ]
        for member in map(declared, dataclasses.fields(cls)):
            value = json.dumps(member.default) if isinstance(member.default, str) else repr(member.default)
            line = f"    {member.name} = {value}"
            about = member.metadata["help"]
            if member.metadata["derived"] is not None:
                about += f"; {member.metadata['derived'].text}"
            if len(line) + len(about) + 4 <= LINE_WIDTH:
                lines.append(f"{line}  # {about}")
            else:
                lines += [*textwrap.wrap(about, LINE_WIDTH, initial_indent="    # ", subsequent_indent="    # "), line]
    return "\n".join(lines) + "\n"


def write(root: Path = HERE.parent) -> None:
    """Write all that is made from the declarations."""
    (root / "docs" / "settings.md").write_text(settings_page(), encoding="utf8")
    (root / "docs" / "settings.schema.json").write_text(schema(), encoding="utf8")
    (root / "config.py").write_text(plain_values(), encoding="utf8")


if __name__ == "__main__":
    write()
