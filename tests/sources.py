"""The program's own sources, found and parsed once a process, and only where a test reads them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OTHER_FOLDERS = {"tests", "docs", "benchmarks", "build", "site", "model_save", "logs", "files"}


@cache
def trees() -> dict[Path, ast.Module]:
    """File, relative to the root -> its syntax tree."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in OTHER_FOLDERS]
    files = [*ROOT.glob("*.py")]
    for folder in folders:
        if not folder.name.startswith("."):
            files += (path for path in folder.rglob("*.py") if "cache" not in path.parts)
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf8")) for path in sorted(files)}
