"""The tests most likely to notice a mutation of a file: those beside it first, then those that import it directly, then
indirectly.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from benchmarks.page import ROOT

TESTS = ("memory", "engine", "data", "model", "training", "support")  # Those of whole runs say little for their time.
SLOW = frozenset({"subprocess", "multiprocessing", "tests.measuring", "tests.ranks"})  # tests with these take longer
QUICK = {
    "memory/estimate/": "tests/memory/estimate/test_kept_predictions.py"
}  # looks at all files of a folder, at once
CHILD = re.compile(r'"(\w+_child\.py)"')
IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)


@cache
def noticed_by(file: str, most: int) -> tuple[str, ...]:
    """The files of tests to ask, the likeliest first; of those that know the file alike, those that start other
    processes last.
    """
    module, wing = _module_of(ROOT / file), ROOT / file.split("/")[0]
    beside, package = ROOT / "tests" / Path(file).parent, module.rpartition(".")[0]
    mirrored = beside / f"test_{Path(file).stem}.py"
    users = {path: _module_of(path) for path in wing.rglob("*.py") if module in imported(path)}
    through = {*users.values(), *([package] if "." in package else [])}  # a package may load by name what is in it
    subjects = {ROOT / "tests" / path.relative_to(ROOT).parent / f"test_{path.stem}.py" for path in users}

    quick = [ROOT / test for folder, test in QUICK.items() if file.startswith(folder)]

    def rank(test: Path) -> tuple[bool, ...]:
        known = imported(test)
        is_apart = beside not in test.parents
        return (
            test not in quick,
            test != mirrored,
            test.parent != beside or not test.stem.startswith(mirrored.stem),
            module not in known,
            not SLOW.isdisjoint(known),
            test not in subjects,
            is_apart and known.isdisjoint(through),
            is_apart,
        )

    def fits(test: Path) -> bool:
        return test in subjects or test.parent == beside or not imported(test).isdisjoint({module, *through})

    every = sorted(path for name in TESTS for path in (ROOT / "tests" / name).rglob("test_*.py"))
    return tuple(path.relative_to(ROOT).as_posix() for path in sorted(filter(fits, every), key=rank)[:most])


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file imports, itself or by the scripts beside it that it starts; what comes from a package may
    be one.
    """
    text = path.read_text(encoding="utf8")
    found = set[str]()
    for module, names, plain in IMPORT.findall(text):
        found |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))} if module else {plain}
    for script in map(path.with_name, CHILD.findall(text)):
        found |= imported(script) if script.is_file() else set()
    return frozenset(found)


def _module_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
