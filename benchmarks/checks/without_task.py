"""Does anything but its own tests need a task? python -m benchmarks.checks.without_task preferences [TESTS ...]

A copy of the tree loses a file of `tasks/` and its entries in the table of tasks. Tests that fail there and not here
are printed: they should be those of the task.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.page import ROOT

TABLE = Path("settings", "tasks.py")
USUAL_TESTS = ("tests/tasks", "tests/test_config.py", "tests/data", "tests/settings", "tests/training/setup")


def copy_without(task: str, folder: Path) -> None:
    """Copy the files that git knows, but for a task's."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        if name == f"tasks/{task}.py" or not (ROOT / name).is_file():
            continue
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy)
    (folder / TABLE).write_text(table_without(task, (ROOT / TABLE).read_text("utf8")), "utf8")


def table_without(task: str, source: str) -> str:
    """The text of the table of tasks without the entries that this file makes."""
    lines = source.splitlines(keepends=True)
    assignments = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    entries = next(node.value for node in assignments if ast.unparse(node.targets[0]) == "TASKS")
    assert isinstance(entries, ast.Dict)
    for key, facts in zip(reversed(entries.keys), reversed(entries.values), strict=True):
        assert key is not None
        assert isinstance(facts, ast.Call)
        made_by = ast.literal_eval(facts.args[0])
        if made_by.partition(":")[0] == task:
            del lines[key.lineno - 1 : facts.end_lineno]
    return "".join(lines)


def failures(folder: Path, tests: list[str]) -> set[str]:
    """The names of the tests that fail in a tree."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--continue-on-collection-errors", *tests]
    output = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True).stdout
    lines = (line.partition(" ") for line in output.splitlines())
    # A name may have blanks, but hardly this between them.
    return {name.partition(" - ")[0] for outcome, _, name in lines if outcome in ("FAILED", "ERROR")}


def main(task: str, *tests: str) -> None:
    """Print the tests that need a task."""
    chosen = list(tests or USUAL_TESTS)
    with tempfile.TemporaryDirectory() as folder:
        copy_without(task, Path(folder))
        needing = failures(Path(folder), chosen)
    if needing:
        needing -= failures(ROOT, sorted(needing))
    print("\n".join(sorted(needing)) or "none")


if __name__ == "__main__":
    main(*sys.argv[1:])
