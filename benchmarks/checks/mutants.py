"""Would a test notice a slip? `python -m benchmarks.checks.mutants --times=300 [--processes=2] [--first=0] [--only=memory/plan.py]`.

One token of one file is changed (a comparison, a number by one, a condition turned round, a statement left out), and the
tests that import that file are run: where they pass, the change is a survivor, told with its line. Which changes are tried
is drawn once, by a fixed seed; `--first` goes on where an earlier run ended. Source: DeMillo, Lipton, Sayward 1978,
"Hints on Test Data Selection". Works where processes can fork.
"""

from __future__ import annotations

import argparse
import ast
import copy
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TARGETS = (
    "memory/**/*.py", "engine/**/*.py", "data/batches/order.py", "data/durable.py", "model/formats/checksums.py",
    "training/checkpoints/*.py",
)  # fmt: skip
TESTS = ("memory", "engine", "data", "model", "training")  # those of whole runs say little for their time
MOST_TEST_FILES = 2  # of a mutant
PROCESSOR_SECONDS = 300
UNCHANGED = -1  # the number of no node
PASSED, NO_TESTS, NOT_RUN = 0, 5, 70
WARM = ("torch", "numpy", "pyarrow.parquet", "pytest", "safetensors.torch", "accelerate")
SWAPPED: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: the file, which of its nodes, and how it reads."""

    file: str
    node: int
    line: int
    before: str
    after: str


def changed(node: Any) -> Any:
    """Another node in the place of this one; None where there is nothing to change."""
    fresh: Any = copy.deepcopy(node)
    if isinstance(fresh, ast.Compare) and type(fresh.ops[0]) in SWAPPED:
        fresh.ops[0] = SWAPPED[type(fresh.ops[0])]()
    elif isinstance(fresh, (ast.BoolOp, ast.BinOp)) and type(fresh.op) in SWAPPED:
        fresh.op = SWAPPED[type(fresh.op)]()
    elif isinstance(fresh, ast.Constant) and isinstance(fresh.value, bool):
        fresh.value = not fresh.value
    elif isinstance(fresh, ast.Constant) and isinstance(fresh.value, int):
        fresh.value += 1 if fresh.lineno % 2 else -1
    elif isinstance(fresh, (ast.If, ast.IfExp)):
        fresh.test = ast.UnaryOp(ast.Not(), fresh.test)
    elif isinstance(fresh, (ast.Raise, ast.AugAssign)) or (
        isinstance(fresh, ast.Expr) and isinstance(fresh.value, ast.Call)
    ):
        return ast.copy_location(ast.Pass(), node)
    else:
        return None
    return ast.fix_missing_locations(fresh)


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every change of a file."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    annotations = [
        part
        for node in ast.walk(tree)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if isinstance(part, ast.AST)
    ]
    unread = {id(inner) for part in annotations for inner in ast.walk(part)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in unread and (fresh := changed(node)) is not None:
            before, after = (ast.unparse(each).splitlines()[0][:100] for each in (node, fresh))
            yield Mutant(path.relative_to(ROOT).as_posix(), number, getattr(node, "lineno", 0), before, after)


def source_of(mutant: Mutant) -> str:
    """The file with the change in it."""
    tree = ast.parse((ROOT / mutant.file).read_text(encoding="utf8"))
    wanted = next(node for number, node in enumerate(ast.walk(tree)) if number == mutant.node)

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return changed(node) or node if node is wanted else self.generic_visit(node)

    return ast.unparse(Change().visit(tree))


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file imports; what is imported from a package may be one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


@cache
def noticed_by(file: str) -> tuple[str, ...]:
    """The tests that import a file's module, its own first; where there are none, those of the files that import it."""
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    tests = sorted(path for wing in TESTS for path in (ROOT / "tests" / wing).rglob("test_*.py"))
    own = f"test_{module.rpartition('.')[2]}.py"
    found = [path for path in tests if module in imported(path)]
    if not found:
        users = [path for path in (ROOT / file.split("/")[0]).rglob("*.py") if module in imported(path)]
        through = {test for user in users for test in noticed_by(user.relative_to(ROOT).as_posix())}
        found = [path for path in tests if path.relative_to(ROOT).as_posix() in through]
    first = sorted(found, key=lambda path: path.name != own)[:MOST_TEST_FILES]
    return tuple(path.relative_to(ROOT).as_posix() for path in first)


def drawn(only: Sequence[str]) -> list[Mutant]:
    """All mutants, in the order in which they are tried."""
    files = sorted({path for pattern in only or TARGETS for path in ROOT.glob(pattern) if path.name != "__init__.py"})
    mutants = [mutant for path in files for mutant in mutants_of(path)]
    random.Random(0).shuffle(mutants)
    return mutants


def try_out(mutant: Mutant, tests: Sequence[str], copy_of_all: Path) -> int:
    """Run the tests in a forked process; returns its number."""
    if mutant.node != UNCHANGED:
        (copy_of_all / mutant.file).write_text(source_of(mutant), encoding="utf8")
    if pid := os.fork():
        return pid
    import resource

    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS + 5))
    sink = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(sink, handle)
    os.chdir(copy_of_all)
    os.environ["PYTHONPATH"] = str(copy_of_all)
    sys.path[0] = str(copy_of_all)
    code = NOT_RUN
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(copy_of_all), *tests]))
    finally:
        os._exit(code)


def survivors(
    mutants: Sequence[Mutant], processes: int, tell: Callable[[str], None], minutes: float = math.inf
) -> tuple[list[Mutant], list[Mutant]]:
    """Try mutants, a few side by side, until all are tried or the time is up.

    Returns:
        those that were tried, and of these the ones that no test has noticed.
    """
    left, running = list(reversed(mutants)), dict[int, tuple[Mutant, Path]]()
    tried, found, end = [], [], time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        free = [Path(folder, str(number)) for number in range(processes)]
        for place in free:
            shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".git", ".venv", "logs", "cache", "__pycache__"))
        while left or running:
            if time.monotonic() > end:
                left.clear()
            if left and free:
                mutant, place = left.pop(), free.pop()
                tests = noticed_by(mutant.file)
                running[try_out(mutant, tests, place)] = (mutant, place)
                continue
            pid, status = os.wait()
            mutant, place = running.pop(pid)
            shutil.copyfile(ROOT / mutant.file, place / mutant.file)
            free.append(place)
            code = os.waitstatus_to_exitcode(status)
            assert code != NOT_RUN, f"the tests of {mutant.file} cannot be run"
            survived = code in (PASSED, NO_TESTS)
            tried.append(mutant)
            found += [mutant] if survived else []
            word = "SURVIVED" if survived else "noticed"
            tell(f"{word} {mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}")
    return tried, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    for module in WARM:
        __import__(module)
    every = drawn([pattern for pattern in asked.only.split(",") if pattern])
    wanted = every[asked.first : asked.first + asked.times]
    sound = Mutant(wanted[0].file, UNCHANGED, 0, "nothing", "nothing")
    assert survivors([sound], 1, print)[1], f"the tests of {sound.file} fail as it is"
    tried, found = survivors(wanted, asked.processes, lambda line: print(line, flush=True), asked.minutes)
    by_wing, lost = (Counter(mutant.file.split("/")[0] for mutant in mutants) for mutants in (tried, found))
    print(f"{len(tried)} of {len(every)} tried, {len(found)} survived; " + ", ".join(f"{wing} {lost[wing]} of {by_wing[wing]}" for wing in by_wing))  # fmt: skip

    from benchmarks.parts.results import write_figures

    figures = {"possible": len(every), "tried": len(tried), "survived": len(found), "first": asked.first}
    parts = {wing: {"tried": by_wing[wing], "survived": lost[wing]} for wing in sorted(by_wing)}
    write_figures("mutants", {**figures, "by_wing": parts, "survivors": [asdict(mutant) for mutant in found]})


if __name__ == "__main__":
    main()
