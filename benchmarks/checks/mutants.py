"""Would a test notice a slip? `python -m benchmarks.checks.mutants --times=300 [--processes=2] [--only=memory/plan.py] [--again]`.

One token of one file is changed (a comparison, a number by one, a condition turned round, a statement left out), and the
tests that import that file are run: where they pass, the change is a survivor, told with its line. Which changes are tried
is drawn once, by a fixed seed; what is tried is noted at once, below data/cache, and not tried a second time while its file
stays as it is. `--again` tries what has survived, against more tests and those written since; what can change nothing is in
`equivalent.py`, with the reason. Source: DeMillo, Lipton, Sayward 1978,
"Hints on Test Data Selection". Works where processes can fork.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.checks.equivalent import reason_of

ROOT = Path(__file__).resolve().parent.parent.parent
TARGETS = (
    "memory/**/*.py", "engine/**/*.py", "data/batches/order.py", "data/durable.py", "model/formats/checksums.py",
    "training/checkpoints/*.py",
)  # fmt: skip
TESTS = ("memory", "engine", "data", "model", "training")  # those of whole runs say little for their time
MOST_TEST_FILES, MOST_AGAIN = 2, 8  # of a mutant; of one that has survived the first ones
SLOW = frozenset({"subprocess", "multiprocessing", "tests.measuring", "tests.ranks"})  # tests with these take longer
PROCESSOR_SECONDS = 120
NOTES = ROOT / "data" / "cache" / "mutants.jsonl"
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
def noticed_by(file: str, most: int = MOST_TEST_FILES) -> tuple[str, ...]:
    """The tests that import a file's module, its own first and those that start other processes last.

    Behind them, or where there are none, those named like the module, those of the files that import it, and of what is
    imported by name those beside it.
    """
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    tests = sorted(path for wing in TESTS for path in (ROOT / "tests" / wing).rglob("test_*.py"))
    own = f"test_{module.rpartition('.')[2]}.py"
    first = [path for path in tests if module in imported(path)]
    if len(first) < most:
        through_them = {
            _module_of(path) for path in (ROOT / file.split("/")[0]).rglob("*.py") if module in imported(path)
        }
        first += [path for path in tests if path.name == own or not through_them.isdisjoint(imported(path))]
    if not first:
        users = [path for path in (ROOT / file.split("/")[0]).rglob("*.py") if module in imported(path)]
        through = {test for user in users for test in noticed_by(user.relative_to(ROOT).as_posix())}
        beside = sorted((ROOT / "tests" / file).parent.glob("test_*.py"))
        first = [path for path in tests if path.relative_to(ROOT).as_posix() in through] or beside
    ranked = sorted(dict.fromkeys(first), key=lambda path: (path.name != own, not SLOW.isdisjoint(imported(path))))
    return tuple(path.relative_to(ROOT).as_posix() for path in ranked[:most])


def _module_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")


def drawn(only: Sequence[str]) -> list[Mutant]:
    """All mutants, in the order in which they are tried."""
    files = sorted({path for pattern in only or TARGETS for path in ROOT.glob(pattern) if path.name != "__init__.py"})
    mutants = [mutant for path in files for mutant in mutants_of(path)]
    random.Random(0).shuffle(mutants)
    return mutants


def _key(mutant: Mutant) -> str:
    """Names a change, and the file that it is made to as it is now."""
    return f"{zlib.crc32((ROOT / mutant.file).read_bytes()):08x} {mutant.file} {mutant.node}"


def noted() -> dict[str, bool]:
    """What was tried: key -> whether it survived."""
    lines = NOTES.read_text(encoding="utf8").splitlines() if NOTES.is_file() else []
    return {key: survived for key, survived in map(json.loads, lines)}


def note(mutant: Mutant, survived: bool) -> None:
    """Keep what came of a change."""
    NOTES.parent.mkdir(parents=True, exist_ok=True)
    with NOTES.open("a", encoding="utf8") as file:
        file.write(json.dumps([_key(mutant), survived]) + "\n")


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


def try_all(
    mutants: Sequence[Mutant],
    processes: int,
    tell: Callable[[Mutant, bool], None],
    minutes: float = math.inf,
    most: int = MOST_TEST_FILES,
) -> None:
    """Try mutants, a few side by side, until all are tried or the time is up.

    Args:
        tell: called with each that was tried, and whether it survived. most: files of tests that are asked.
    """
    left, running = list(reversed(mutants)), dict[int, tuple[Mutant, Path]]()
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        free = [Path(folder, str(number)) for number in range(processes)]
        for place in free:
            shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".git", ".venv", "logs", "cache", "__pycache__"))
        while left or running:
            if time.monotonic() > end:
                left.clear()
            if left and free:
                mutant, place = left.pop(), free.pop()
                tests = noticed_by(mutant.file, most)
                running[try_out(mutant, tests, place)] = (mutant, place)
                continue
            pid, status = os.wait()
            mutant, place = running.pop(pid)
            shutil.copyfile(ROOT / mutant.file, place / mutant.file)
            free.append(place)
            code = os.waitstatus_to_exitcode(status)
            assert code != NOT_RUN, f"the tests of {mutant.file} cannot be run"
            tell(mutant, code in (PASSED, NO_TESTS))


def told(mutant: Mutant, survived: bool) -> None:
    """On the screen, and in the notes."""
    word = "SURVIVED" if survived else "noticed"
    print(f"{word} {mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)
    note(mutant, survived)


def figures(every: Sequence[Mutant]) -> dict[str, Any]:
    """What is known of all of these."""
    known = noted()
    tried = {mutant: known[key] for mutant in every if (key := _key(mutant)) in known}
    lost = [mutant for mutant, survived in tried.items() if survived]
    same = {mutant: reason for mutant in lost if (reason := reason_of(*_parts(mutant)))}
    by_wing, of_these = (Counter(mutant.file.split("/")[0] for mutant in mutants) for mutants in (tried, lost))
    return {
        "possible": len(every), "tried": len(tried), "survived": len(lost), "equivalent": len(same),
        "by_wing": {wing: {"tried": by_wing[wing], "survived": of_these[wing]} for wing in sorted(by_wing)},
        "survivors": [{**asdict(mutant), "equivalent": same.get(mutant, "")} for mutant in lost],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    for module in WARM:
        __import__(module)
    every, known = drawn([pattern for pattern in asked.only.split(",") if pattern]), noted()
    if asked.again:
        wanted = [mutant for mutant in every if known.get(_key(mutant)) and not reason_of(*_parts(mutant))]
    else:
        wanted = [mutant for mutant in every if _key(mutant) not in known]
    if wanted:
        sound, passed = Mutant(wanted[0].file, UNCHANGED, 0, "nothing", "nothing"), list[bool]()
        try_all([sound], 1, lambda _, survived: passed.append(survived))
        assert passed == [True], f"the tests of {sound.file} fail as it is"
    most = MOST_AGAIN if asked.again else MOST_TEST_FILES
    try_all(wanted[: asked.times], asked.processes, told, asked.minutes, most)
    found = figures(every)
    print(f"{found['tried']} of {found['possible']} tried, {found['survived']} survived, {found['equivalent']} of them equivalent")  # fmt: skip

    from benchmarks.parts.results import write_figures

    write_figures("mutants", found)


def _parts(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file, mutant.before, mutant.after


if __name__ == "__main__":
    main()
