"""Mutations of a file, one token each: a comparison, a number by one, a negated condition, a statement left out.

A slip is named by the function around it, what stood there and what stands there now, so that a change elsewhere in the
file leaves its name as it was: what came of it stays known. Which are tried first is drawn by that name. Source:
DeMillo, Lipton, Sayward 1978, "Hints on Test Data Selection".
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import ROOT

TARGETS = (
    "memory/**/*.py",
    "engine/**/*.py",
    "data/batches/order.py",
    "support/storage.py",
    "model/formats/checksums.py",
    "training/checkpoints/*.py",
)
SWAPPED: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One change: the file, which of its nodes, how it reads, the statement that it stands in, and a name that
    stays.
    """

    file: str
    node: int
    line: int
    before: str
    after: str
    statement: str
    key: str

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """What `equivalent.py` knows it by."""
        return self.file, self.statement, self.before, self.after


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
    # how large a cache is, and that nobody may assign, is for the reader
    decorators = [part for node in ast.walk(tree) for part in getattr(node, "decorator_list", [])]
    unread = {id(inner) for part in (*annotations, *decorators) for inner in ast.walk(part)}
    around, file, alike = _surroundings(tree), path.relative_to(ROOT).as_posix(), Counter[str]()
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in unread and (fresh := changed(node)) is not None:
            before, after = (_first_line(each) for each in (node, fresh))
            function, statement = around[id(node)]
            name = f"{file} {short_sum(function)} {statement} | {before} -> {after}"
            alike[name] += 1
            yield Mutant(file, number, getattr(node, "lineno", 0), before, after, statement, f"{name} #{alike[name]}")


def _surroundings(tree: ast.Module) -> dict[int, tuple[str, str]]:
    """Node -> the function (or statement of a class or file) around it, and the statement's first line."""
    found: dict[int, tuple[str, str]] = {}

    def look(node: ast.AST, function: str, statement: str, is_outside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            here = ast.unparse(child) if is_outside else function
            said = _first_line(child) if isinstance(child, (ast.stmt, ast.ExceptHandler)) else statement
            found[id(child)] = here, said
            look(child, here, said, is_outside and isinstance(child, ast.ClassDef))

    look(tree, "", "", True)
    return found


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:100]


def short_sum(text: str) -> str:
    """A short sum of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def source_of(mutant: Mutant) -> str:
    """The file with the change in it."""
    tree = ast.parse((ROOT / mutant.file).read_text(encoding="utf8"))
    wanted = next(node for number, node in enumerate(ast.walk(tree)) if number == mutant.node)

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return changed(node) or node if node is wanted else self.generic_visit(node)

    return ast.unparse(Change().visit(tree))


def drawn(only: Sequence[str]) -> list[Mutant]:
    """All mutants, in the order in which they are tried: those of a function that stays keep their place in it."""
    files = sorted({path for pattern in only or TARGETS for path in ROOT.glob(pattern) if path.name != "__init__.py"})
    return sorted((mutant for path in files for mutant in mutants_of(path)), key=lambda mutant: short_sum(mutant.key))
