"""How is `docs/settings.md` made? From the declarations in `config.py`: `python docs/make_settings.py` writes it again."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # run as a script, Python would look beside this file only

from config import COMMANDS, GROUPS, flags_of  # noqa: E402
from settings.fields import allowed, show  # noqa: E402
from settings.precedence import model_presets, run_presets  # noqa: E402

HEAD = """# Settings

Made from `config.py` by `python docs/make_settings.py`; change it there.

Every setting is a flag (`--name=value`) and a line of a YAML or JSON file (`--config=FILE`).
Order: defaults < preset < file < flags. True and False may also be written yes, no, on, off, 1, 0; sizes 6G, 512M, 1.5GiB
or bytes (1 G = 1024^3). `python train_low_mem.py COMMAND --help` shows the same in a terminal.
A setting marked • defines its run: a run that goes on keeps its own, and another value is refused.
"""


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
        for member in dataclasses.fields(cls):
            commands = ", ".join(command for command, flags in taken_by.items() if member.name in flags)
            default = "none" if member.default is None else show(member, member.default)
            name = f"`{member.name}`" + (" •" if member.metadata["defines"] else "")
            cells = (name, default, allowed(member.metadata), member.metadata["help"], commands)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "settings.md").write_text(settings_page(), encoding="utf8")
