"""A slip is one change of a file, the file stays as it is, and the tests that import it are found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.checks import mutants
from benchmarks.checks.equivalent import SAME
from benchmarks.checks.mutants import ROOT, changed, drawn, figures, mutants_of, note, noticed_by, source_of


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", "a <= b"), ("a == b", "a != b"), ("a and b", "a or b"), ("a + b", "a - b"), ("True", "False"),
        ("if a:\n    b", "if not a:\n    b"), ("raise ValueError", "pass"), ("a += b", "pass"), ("print(a)", "pass"),
    ],
)  # fmt: skip
def test_what_is_changed(before: str, after: str) -> None:
    node = ast.parse(before).body[0]
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call):
        assert ast.unparse(changed(node.value)) == after
    else:
        assert ast.unparse(changed(node)) == after
    assert ast.unparse(node) == before, "the file itself stays"


def test_a_mutant_is_its_file_with_one_change() -> None:
    path = ROOT / "data" / "batches" / "order.py"
    plain = ast.unparse(ast.parse(path.read_text(encoding="utf8"))).splitlines()
    for mutant in list(mutants_of(path))[::7]:
        lines = source_of(mutant).splitlines()
        assert lines != plain and sum(a != b for a, b in zip(lines, plain, strict=False)) > 0
        assert any(mutant.after in line for line in lines) or mutant.after == "pass"


def test_the_same_mutants_in_every_run_and_tests_for_all() -> None:
    first = drawn(["data/batches/order.py", "memory/cost/blocks.py"])
    assert first == drawn(["data/batches/order.py", "memory/cost/blocks.py"]) and len({m.file for m in first[:20]}) == 2
    assert noticed_by("data/batches/order.py")[0] == "tests/data/batches/test_order.py"
    files = {path for pattern in mutants.TARGETS for path in ROOT.glob(pattern) if path.name != "__init__.py"}
    untested = [str(path) for path in files if not noticed_by(path.relative_to(ROOT).as_posix())]
    assert len(files) > 50 and not untested


def test_what_was_tried_is_known_until_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "NOTES", tmp_path / "cache" / "notes.jsonl")
    every = drawn(["data/batches/order.py"])
    assert figures(every)["tried"] == 0
    note(every[0], True)
    note(every[1], True)
    note(every[2], False)
    note(every[1], False)  # a test was written since
    monkeypatch.setattr(mutants, "reason_of", lambda *parts: "it says the same")
    found = figures(every)
    assert (found["tried"], found["survived"], found["equivalent"]) == (3, 1, 1)
    assert found["survivors"][0]["line"] == every[0].line and found["by_wing"] == {"data": {"tried": 3, "survived": 1}}
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "data" / "batches").mkdir(parents=True)
    (tmp_path / "data" / "batches" / "order.py").write_text("other = 1")
    assert figures(every)["tried"] == 0


def test_what_is_called_equivalent_is_a_change_that_can_be_made() -> None:
    for file, before, after in SAME:
        assert any((m.before, m.after) == (before, after) for m in mutants_of(ROOT / file)), (file, before)
