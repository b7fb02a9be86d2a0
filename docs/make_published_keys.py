"""Writes the tables of published keys in `docs/finetuning.md` from the declaration in `settings/published_keys.py`.

`python docs/make_published_keys.py` writes them again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # run as a script, Python would look beside this file only

from settings.published_keys import CONFIG, FILES, GENERATION_KEYS, REFUSED, Key  # noqa: E402

MARKS = "<!-- made by docs/make_published_keys.py -->", "<!-- end -->"


def page(text: str) -> str:
    """The text of `docs/finetuning.md` with its tables of keys made anew."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{tables()}{MARKS[1]}{after}"


def tables() -> str:
    """One table a file; keys with the same meaning stand in one row."""
    lines: list[str] = []
    for file, keys in FILES.items():
        rows: dict[int, tuple[Key, list[str]]] = {}
        for name, key in keys.items():
            if file != CONFIG or key is not GENERATION_KEYS.get(name):
                rows.setdefault(id(key), (key, []))[1].append(f"`{name}`")
        lines += ["", f"`{file}`", "", "| key | here | meaning |", "|---|---|---|"]
        for key, names in rows.values():
            kind = key.kind
            if kind == REFUSED:
                kind += ", except " + ", ".join(f"`{json.dumps(value)}`" for value in (*key.allowed, None))
            lines.append(f"| {', '.join(names)} | {kind} | {key.does} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    place = HERE / "finetuning.md"
    place.write_text(page(place.read_text(encoding="utf8")), encoding="utf8")
