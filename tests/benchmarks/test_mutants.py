"""A slip is one change of a file, its name stays while its function does, and the tests that know the file are found."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.checks import asked, mutants, slips
from benchmarks.checks.asked import noticed_by
from benchmarks.checks.equivalent import SAME
from benchmarks.checks.mutants import MOST_TEST_FILES, body, figures, note
from benchmarks.checks.slips import ROOT, changed, drawn, mutants_of, source_of


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
    files = {path for pattern in slips.TARGETS for path in ROOT.glob(pattern) if path.name != "__init__.py"}
    untested = [str(path) for path in files if not noticed_by(path.relative_to(ROOT).as_posix(), MOST_TEST_FILES)]
    assert len(files) > 50 and not untested


def test_a_name_stays_while_its_function_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slips, "ROOT", tmp_path)
    path = tmp_path / "plan.py"
    path.write_text("def one(a):\n    return a < 1\n\n\nclass Two:\n    def two(self, a):\n        return a > 2\n")
    before = {mutant.key for mutant in mutants_of(path)}
    path.write_text(
        "import os\n\n\ndef one(a):\n    return a < 3\n\n\nclass Two:\n    def two(self, a):\n        return a > 2\n"
    )
    after = {mutant.key for mutant in mutants_of(path)}
    assert len(before) == len(after) == 4 and {key.split("|")[0].split()[-2] for key in before & after} == {">"}


def test_the_tests_beside_a_file_are_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "memory/cost.py": "", "memory/plan.py": "from memory import cost", "tests/memory/test_cost.py": "from memory.plan import plan",
        "tests/memory/test_plan.py": "from memory.plan import plan", "tests/memory/test_apart.py": "from memory.cost import x\nimport subprocess",
        "tests/data/test_cost.py": "import data.cost", "tests/data/test_uses.py": "from memory.cost import x",
        "tests/memory/test_ranks.py": 'CHILD = "own_child.py"', "tests/memory/own_child.py": "import memory.cost\nimport tests.ranks",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(asked, "ROOT", tmp_path)
    expected = [
        "tests/memory/test_cost.py",
        "tests/data/test_uses.py",
        "tests/memory/test_apart.py",
        "tests/memory/test_ranks.py",
        "tests/memory/test_plan.py",
    ]
    assert list(asked.noticed_by("memory/cost.py", 9)) == expected


def test_what_was_tried_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "NOTES", tmp_path / "cache" / "notes.jsonl")
    every = drawn(["data/batches/order.py"])
    assert figures(every)["tried"] == 0
    for number in (0, 1, 2):
        note(every[number], True)
    note(every[3], False)
    note(every[1], False)  # a test was written since
    monkeypatch.setattr(mutants, "reason_of", lambda *parts: "it says the same" if parts == every[0].parts else "")
    found = figures(every)
    assert found["by_wing"] == {
        "data": {"tried": 4, "survived_at_first": 3, "noticed_since": 1, "equivalent": 1, "left": 1}
    }
    assert {each["line"]: each["equivalent"] for each in found["survivors"]} == {
        every[0].line: "it says the same",
        every[2].line: "",
    }
    assert body(found).splitlines()[-1] == "| in all | 4 | 3 | 1 | 1 | 1 |"


def test_what_is_called_equivalent_is_a_change_that_can_be_made() -> None:
    known = {file: {mutant.parts for mutant in mutants_of(ROOT / file)} for file in {parts[0] for parts in SAME}}
    assert not [parts for parts in SAME if parts not in known[parts[0]]]
