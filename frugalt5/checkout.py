"""The modules of a checkout below one name: `config` becomes `frugalt5.config`, also where one imports another.

In a checkout they have plain names, which an installed package would take away from the user's own `config.py` or
`data/`. A wheel is built with its imports rewritten (`setup.py`). An editable install, or a checkout on `sys.path`, has
them rewritten as each file is imported, by the same function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "frugalt5"
IMPORT_FROM = re.compile(rb"from[\s\\]+")


def top_names(root: Path) -> set[str]:
    """The modules and packages in the root folder of a checkout, without this package."""
    files = {path.stem for path in root.glob("*.py")}
    folders = {path.parent.name for path in root.glob("*/__init__.py")}
    return (files | folders) - {PACKAGE, "setup"}


def rewritten(source: str, names: Collection[str]) -> str:
    """Source text whose imports of these modules name them below the package. Line numbers and all else stay.

    Args:
        names: the first names of the modules, such as `config` and `data`.
    """
    text = source.encode()
    line_starts = [0]
    for line in text.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    insertions: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _first(node.module) in names:
            keyword = IMPORT_FROM.match(text, line_starts[node.lineno - 1] + node.col_offset)
            assert keyword is not None
            insertions.append((keyword.end(), f"{PACKAGE}."))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = _first(alias.name)
                if first not in names:
                    continue
                insertions.append((line_starts[alias.lineno - 1] + alias.col_offset, f"{PACKAGE}."))
                # `import data.prepare` binds `data`, which `as` keeps.
                end = line_starts[(alias.end_lineno or alias.lineno) - 1] + (alias.end_col_offset or 0)
                if alias.name == first and alias.asname is None:
                    insertions.append((end, f" as {first}"))
                elif alias.asname is None:
                    insertions.append((end, f", {PACKAGE}.{first} as {first}"))
    for position, word in sorted(insertions, reverse=True):
        text = text[:position] + word.encode() + text[position:]
    return text.decode()


def _first(module: str | None) -> str:
    return (module or "").partition(".")[0]


class CheckoutFinder:
    """Finds `frugalt5.config` and all else below the package in a checkout; an entry of `sys.meta_path`."""

    def __init__(self, root: Path) -> None:
        self._names = top_names(root)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{PACKAGE}."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = CheckoutLoader(name, spec.loader.path, self._names)
        return spec


class CheckoutLoader(SourceFileLoader):
    """Loads a file with its imports rewritten. Its bytecode is kept beside that of the module with the plain name."""

    def __init__(self, name: str, path: str, names: Collection[str]) -> None:
        super().__init__(name, path)
        self._names = names

    def source_to_code(self, data: Any, path: Any, **options: Any) -> CodeType:  # type: ignore[override]
        return super().source_to_code(rewritten(decode_source(data), self._names), path, **options)

    def get_data(self, path: str) -> bytes:
        return super().get_data(_own_bytecode(path))

    def set_data(self, path: str, data: Any, **mode: int) -> None:
        super().set_data(_own_bytecode(path), data, **mode)


def _own_bytecode(path: str) -> str:
    return path.removesuffix("pyc") + f"{PACKAGE}.pyc" if path.endswith(".pyc") else path
