"""The house keeps its shape: imports point one way, names stay in their place, files and functions stay small."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_FOLDER_FILES = 400, 60, 17
# every setting stands in one file, so that there is one place to look; it grows with the settings alone
LONGER_FILES = {"config.py": 770}
# wing -> the wings it may import
GROUND = {
    "leaving",
    "formats",
    "terminal",
    "bounded",
    "limits",
    "units",
    "settings",
    "config",
    "screen",
    "language",
    "optimizers",
}
FACES = (
    "units",
    "model.shapes",
    "memory.observe",
)  # files without torch that others may import than their folder's neighbours
WINGS: dict[str, set[str]] = {
    "leaving": {"training"},  # under a launcher, for the last line
    "bounded": set(),
    "limits": set(),
    "units": set(),
    "screen": set(),
    "terminal": set(),
    "formats": set(),
    "language": set(),
    "optimizers": {"limits"},
    "settings": {"units", "language", "bounded", "config"},  # config only for the types of what is checked
    "config": {"settings", "units", "bounded", "language", "optimizers"},
    "devices": GROUND,
    "model": GROUND | {"devices", "model.shapes"},
    "data": GROUND | {"devices", "memory.observe"},
    "model.shapes": {"settings", "config"},
    "memory.observe": GROUND | {"devices"},
    "memory": GROUND | {"devices", "model.shapes", "memory.observe"},
    "engine": GROUND | {"devices", "model", "model.shapes", "data", "memory", "memory.observe"},
    "training": GROUND | {"devices", "model", "model.shapes", "data", "memory", "memory.observe", "engine"},
    "trainer_low_mem": GROUND
    | {"devices", "model", "model.shapes", "data", "memory", "memory.observe", "engine", "training"},
    "commands": GROUND | {"devices", "model", "model.shapes", "data", "memory", "memory.observe", "engine", "training"},
    "web": GROUND,
    "board": GROUND | {"web"},  # it talks to runs through files and child processes
    "serving": GROUND
    | {"devices", "model", "model.shapes", "data", "memory", "memory.observe", "engine", "training", "commands", "web"},
    "train_low_mem": GROUND | {"devices", "training", "commands", "trainer_low_mem", "board", "serving"},
}
TREES = (
    "settings",
    "devices",
    "model",
    "data",
    "memory",
    "memory.observe",
    "engine",
    "training",
    "commands",
    "web",
    "board",
    "serving",
)
SOURCES = sorted(
    path
    for path in (*ROOT.glob("*.py"), *(path for tree in TREES for path in (ROOT / tree).rglob("*.py")))
    if "cache" not in path.relative_to(ROOT).parts
)
EVERYTHING = SOURCES + sorted(path for tree in ("tests", "docs", "benchmarks") for path in (ROOT / tree).rglob("*.py"))
FOLDERS = sorted({path.parent for path in EVERYTHING} - {ROOT})
PACKAGES = {path.parent for path in EVERYTHING if path.name == "__init__.py"}
# rooms of one wing, each of which may import those before it; the last is what stands in front of them
ROOMS: tuple[tuple[str, ...], ...] = (
    ("training.report", "training.processes", "training.evaluation", "training.checkpoints", "training.start",
     "training.budget", "training"),
    ("memory.observe", "memory"),
    ("memory.cost", "memory"),
)  # fmt: skip
# module -> the only places that may import it
ONLY_IN = {
    "fire": {"train_low_mem"},
    "accelerate": {"trainer_low_mem", "training", "commands", "engine"},
    "transformers": set(),
    "datasets": set(),
    "peft": set(),
    "sentencepiece": set(),
    "starlette": {"web", "board", "serving"},
    "uvicorn": {"web"},
}
BACKEND_NAMES = re.compile(r"^(torch\.(cuda|mps|xpu)|torch\.backends\.(cuda|mps|cudnn))(\.|$)")


def title(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def wing_of(module: str) -> str:
    """The folder of a module, or the file itself where others may import it alone; also of a name in that file."""
    return next((face for face in FACES if f"{module}.".startswith(f"{face}.")), module.split(".")[0])


def room_of(module: str) -> str:
    """The folder of a module, with its dots."""
    parts = module.split(".")
    return ".".join(parts[:2] if len(parts) > 1 and ROOT.joinpath(*parts[:2]).is_dir() else parts[:1])


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf8"), filename=str(path))


def imports_of(path: Path, run: bool = False) -> Iterator[str]:
    """Modules that a file imports, also inside functions; `from memory import plan` counts as memory.plan."""
    for node in running_parts(tree_of(path)) if run else ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = ROOT.joinpath(*str(node.module).split("."), alias.name)
                is_module = inner.with_suffix(".py").is_file() or inner.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else str(node.module)


def running_parts(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, without what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and dotted(child.test).endswith("TYPE_CHECKING")):
            yield child
            yield from running_parts(child)


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def says_enough(function: ast.FunctionDef) -> bool:
    """A property of one line is named by its name; the class's docstring says what it is about."""
    is_property = any(dotted(decorator).endswith("property") for decorator in function.decorator_list)
    return ast.get_docstring(function) is not None or (is_property and len(function.body) == 1)


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


@pytest.mark.parametrize("path", SOURCES, ids=title)
def test_imports_point_one_way(path: Path) -> None:
    wing = wing_of(module_of(path))
    assert wing in WINGS, f"{wing} has no place in the order of imports"
    for module in imports_of(path):
        other = wing_of(module)
        if other in WINGS and other != wing:
            assert other in WINGS[wing], f"{title(path)} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=title)
def test_rooms_import_those_before_them(path: Path) -> None:
    """Inside training each room stands on the earlier ones; what it costs and what is observed know no planner."""
    here = room_of(module_of(path))
    for module in imports_of(path):
        there = room_of(module)
        for order in ROOMS:
            if here in order and there in order:
                assert order.index(there) <= order.index(here), f"{title(path)} imports {module}"


def test_no_import_goes_round_in_a_circle() -> None:
    """Also inside functions; an import for types alone is none, as nothing runs then."""
    known = {module_of(path): path for path in SOURCES}
    left = {
        module: {other for other in imports_of(path, run=True) if other in known and other != module}
        for module, path in known.items()
    }
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"circles among {sorted(left)}"


@pytest.mark.parametrize("folder", FOLDERS, ids=title)
def test_a_folder_can_be_held_in_mind(folder: Path) -> None:
    files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MAX_FOLDER_FILES, f"{title(folder)} has {len(files)} files: which two trades are in it?"


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder in PACKAGES], ids=title)
def test_a_folder_says_what_is_in_it(folder: Path) -> None:
    """In three lines: what is there, and who may import what."""
    text = ast.get_docstring(tree_of(folder / "__init__.py")) or ""
    assert len(text.splitlines()) >= 3, f"{title(folder)}/__init__.py"


@pytest.mark.parametrize("path", SOURCES, ids=title)
def test_some_modules_are_imported_in_one_place(path: Path) -> None:
    wing = wing_of(module_of(path))
    for module in imports_of(path):
        head = module.split(".")[0]
        assert head not in ONLY_IN or wing in ONLY_IN[head], f"{title(path)} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=title)
def test_only_devices_names_a_backend(path: Path) -> None:
    if wing_of(module_of(path)) == "devices":
        return
    used = [dotted(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)] + list(
        imports_of(path)
    )
    named = sorted({name for name in used if BACKEND_NAMES.match(name)})
    assert not named, f"{title(path)} names {named}"


TORCHLESS = ("data", "formats", "bounded", "limits", "optimizers", "model.shapes")


@pytest.mark.parametrize("path", [path for path in SOURCES if wing_of(module_of(path)) in TORCHLESS], ids=title)
def test_data_and_descriptions_do_not_import_torch(path: Path) -> None:
    assert not [module for module in imports_of(path) if module.split(".")[0] == "torch"]


@pytest.mark.parametrize("path", [path for path in SOURCES if wing_of(module_of(path)) in ("board", "web")], ids=title)
def test_the_page_stays_small(path: Path) -> None:
    """Its process lives for days beside the runs: the standard library, its web library, and the ground."""
    known = sys.stdlib_module_names | {"starlette", "uvicorn", "board", "web"} | GROUND
    units = "units"
    assert not [name for name in imports_of(path) if name.split(".")[0] not in known and not name.startswith(units)]


@pytest.mark.parametrize(
    "path",
    [
        ROOT / f"{name}.py"
        for name in (
            "settings/fields",
            "settings/precedence",
            "settings/consistency",
            "config",
            "language",
            "screen",
            "terminal",
            "leaving",
            "bounded",
            "optimizers",
            "train_low_mem",
        )
    ],
    ids=title,
)
def test_flags_are_checked_before_heavy_imports(path: Path) -> None:
    heads = {
        module.split(".")[0]
        for node in tree_of(path).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for module in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    assert not heads & {
        "torch",
        "pyarrow",
        "numpy",
        "fire",
        "rich",
        "loguru",
        "training",
        "commands",
        "trainer_low_mem",
        "devices",
    }


@pytest.mark.parametrize("path", EVERYTHING, ids=title)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf8").splitlines()) <= LONGER_FILES.get(title(path), MAX_FILE_LINES), title(
        path
    )
    long = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions_of(path)}
    assert not {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES}, title(path)


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name != "__init__.py"], ids=title)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), f"{title(path)} does not say which question it answers"
    missing = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            missing += [] if ast.get_docstring(node) else [node.name]
        # an override says nothing new unless it does something new
        if isinstance(node, ast.ClassDef) and not node.bases and not node.name.startswith("_"):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
            missing += [f"{node.name}.{method.name}" for method in methods if not says_enough(method)]
    assert not missing, f"{title(path)}: {missing}"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name != "__init__.py"], ids=title)
def test_public_signatures_are_typed(path: Path) -> None:
    for function in functions_of(path):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        if not function.name.startswith("_"):
            assert not untyped and function.returns is not None, f"{title(path)}: {function.name} {untyped}"


@pytest.mark.parametrize("path", EVERYTHING, ids=title)
def test_nothing_is_left_for_later(path: Path) -> None:
    text = path.read_text(encoding="utf8")
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "raise Not" + "ImplementedError")
    assert not [word for word in words if re.search(rf"\b{word}\b", text) and path != Path(__file__)], title(path)
    assert path.name not in ("utils.py", "helpers.py", "common.py", "misc.py"), "name the concept"
    bare = [
        node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare, f"{title(path)}: bare except in lines {bare}"


@pytest.mark.parametrize("path", SOURCES, ids=title)
def test_measured_speeds_decide_nothing(path: Path) -> None:
    """They are taken in devices/, and read where times are told; a choice that read them would change on a busy machine."""
    text, place = path.read_text(encoding="utf8"), title(path)
    if wing_of(module_of(path)) != "devices":
        assert "multiply_rate" not in text and "copy_rate(" not in text, place
    if re.search(r"\bas_measured\(", text):
        assert place in {"memory/cost/work.py", "memory/plan.py", "memory/alternatives.py", "memory/cost/duration.py"}
    if place == "memory/plan.py":
        assert text.count("as_measured(") == 1, "of a plan's seconds alone"


@pytest.mark.parametrize("path", SOURCES, ids=title)
def test_no_clock_that_can_be_set_decides_anything(path: Path) -> None:
    """It names things and orders runs, where a jump is provided for; durations come from clocks that only grow.

    Signs of life and points of charts are read by other processes, which share no other clock.
    """
    read_elsewhere = (
        "board/launching.py",
        "board/runs.py",
        "training/report/heartbeat.py",
        "training/report/journal.py",
        "serving/replies.py",  # when an answer was made
    )
    if title(path) not in ("training/checkpoints/runs.py", "training/checkpoints/ownership.py", *read_elsewhere):
        assert "time.time(" not in path.read_text(encoding="utf8") and "datetime.now(" not in path.read_text(
            encoding="utf8"
        )


@pytest.mark.parametrize("path", SOURCES, ids=title)
def test_sizes_are_shown_in_one_place(path: Path) -> None:
    """Bytes inside; only units.py turns them into GiB for people."""
    if title(path) != "units.py":
        shown = re.search(r"\{[^{}]*/ *(2\*\*30|1024\*\*3|1e9|GIB|GiB)[^{}]*\}", path.read_text(encoding="utf8"))
        assert shown is None, f"{title(path)}: {shown.group(0) if shown else ''}"


def test_tests_are_no_package() -> None:
    """Files of one name in two wings would shadow each other."""
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_requirements_name_what_is_imported() -> None:
    files = ("requirements.txt", "requirements-board.txt")
    lines = [line.split("#")[0].strip() for file in files for line in (ROOT / file).read_text().splitlines()]
    wanted = {line for line in lines if line and not line.startswith("-r ")}
    names = {re.split(r"[<>=!~;\[ ]", line)[0].lower() for line in wanted}
    modules = {module.split(".")[0] for path in SOURCES for module in imports_of(path)}
    imported = {name for name in names if {"pyyaml": "yaml"}.get(name, name.replace("-", "_")) in modules}
    assert names == imported, f"required and not imported: {names - imported}"
    pinned = (ROOT / "constraints.txt").read_text()
    for name in names:
        assert f"\n{name}==" in pinned, f"{name} has no exact version in constraints.txt"
