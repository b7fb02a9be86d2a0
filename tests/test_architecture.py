"""Imports go one way, only devices/ names a backend, and the heavy libraries stay where they are paid for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests import sources
from tests.sources import ROOT

# each layer may import those before it; what shares a layer does not know its neighbours
LAYERS: tuple[set[str], ...] = (
    {"ground"},
    {"devices", "support.web", "data.sources.formats", "training.report.run_files"},
    {"model.shapes", "model.row_groups", "memory.processes"},
    {"memory.system_limits", "memory.monitor"},
    {"model", "data", "memory"},
    {"engine"},
    {"tasks"},
    {"training"},
    {"trainer_low_mem", "commands"},
    {"serving", "board"},
    {"train_low_mem"},
    {"frugalt5"},
)
GROUND_FOLDERS = {"settings", "support"}  # beside the files in the root folder
# whose -> the only packages of ours it may import besides its own
ONLY = {
    "data": {"ground", "data.sources.formats", "devices", "memory.processes", "memory.system_limits"},
    "board": {"ground", "support.web", "data.sources.formats", "training.report.run_files"},
    "support.web": {"ground"},
    "data.sources.formats": {"ground"},
    "training.report.run_files": {"ground"},
}
# library -> the only parts, or modules, that may import it
LIBRARIES: dict[str, set[str]] = {
    # each of the three costs 65-100 MB
    "transformers": set(),
    "datasets": set(),
    "peft": set(),
    "torch": {"devices", "model", "memory", "engine", "tasks", "training", "trainer_low_mem", "commands", "serving"},
    "fire": {"train_low_mem"},
    "accelerate": {"engine", "training", "trainer_low_mem", "commands"},
    "starlette": {"support.web", "board", "serving"},
    "uvicorn": {"support.web"},
}
BACKENDS = re.compile(r"torch\.(cuda|mps|xpu|backends\.(cuda|mps|cudnn))(\.|$)")
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts}


@cache
def modules() -> dict[str, ast.Module]:
    """The program's modules by name, each as its syntax tree."""
    return {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): tree for path, tree in sources.trees().items()
    }


def part_of(module: str) -> str:
    """Which part of the house a module belongs to; itself where it is another's library."""
    names = [".".join(module.split(".")[:length]) for length in (3, 2, 1)]
    known = [name for name in names if name in LAYER]
    top = names[-1]
    ours = top in modules() and not any(name.startswith(f"{top}.") for name in modules())
    return known[0] if known else "ground" if ours or top in GROUND_FOLDERS else top


def imports_of(tree: ast.AST, run: bool = False) -> Iterator[str]:
    """Modules imported, also inside functions; with `run` without those for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # None is within an expression.
        if run and isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules() else str(node.module) for name in full)
        else:
            yield from imports_of(node, run)


def test_imports_go_one_way() -> None:
    for module, tree in modules().items():
        part = part_of(module)
        assert part in LAYER, f"{part} has no place in the order of imports"
        for imported in imports_of(tree):
            other = part_of(imported)
            if other not in LAYER or other == part:
                continue
            assert other in ONLY.get(part, LAYER) and LAYER[other] < LAYER[part], f"{module} imports {imported}"


def test_no_import_goes_round_in_a_circle() -> None:
    """An import for types alone is none, as nothing runs then."""
    left = {
        module: {other for other in imports_of(tree, run=True) if other in modules() and other != module}
        for module, tree in modules().items()
    }
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"circles among {sorted(left)}"


def test_libraries_are_imported_where_they_are_paid_for() -> None:
    for module, tree in modules().items():
        for imported in imports_of(tree):
            allowed = LIBRARIES.get(imported.split(".")[0])
            assert allowed is None or {part_of(module), module} & allowed, f"{module} imports {imported}"


def test_only_devices_names_a_backend() -> None:
    for module, tree in modules().items():
        if part_of(module) != "devices":
            attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
            used = [ast.unparse(node) for node in attributes if node.attr in ("cuda", "mps", "xpu", "cudnn")]
            named = [name for name in [*used, *imports_of(tree)] if BACKENDS.match(name)]
            assert not named, f"{module} names {named}"


def test_requirements_name_what_is_imported() -> None:
    lines = [line for file in ("", "-board") for line in (ROOT / f"requirements{file}.txt").read_text().splitlines()]
    wanted = {line.split("#")[0].strip() for line in lines} - {""}
    names = {re.split(r"[<>=!~;\[ ]", line)[0].lower() for line in wanted if not line.startswith("-r ")}
    imported_tops = {imported.split(".")[0] for tree in modules().values() for imported in imports_of(tree)}
    unused = {name for name in names if {"pyyaml": "yaml"}.get(name, name.replace("-", "_")) not in imported_tops}
    assert not unused, f"required and not imported: {unused}"
    pinned = (ROOT / "constraints.txt").read_text()
    for name in names:
        assert f"\n{name}==" in pinned, f"{name} has no exact version in constraints.txt"
