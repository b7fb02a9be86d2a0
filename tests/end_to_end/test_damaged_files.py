"""No damaged file ends the interpreter or gives a traceback: it is read, or a sentence says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzzing import mutations

# kinds that once crashed the interpreter, and one of each trade; `python -m benchmarks.checks.fuzz` has all kinds
# and runs as long as it is asked to
KINDS = ("a.arrow", "a.parquet", "a.jsonl", "spiece", "pairs", "state", "a.json")


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_copies_are_read_or_told(tmp_path: Path, kind: str) -> None:
    outcome = mutations.survey(kind, tmp_path, range(12))
    assert not outcome.bad, "\n".join(outcome.bad)
    assert outcome.read and outcome.told


def test_a_crash_of_the_child_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The survey itself: a child that dies is bad, and the copies after it are still opened."""
    code = (
        "import os, sys; from pathlib import Path; import benchmarks.fuzzing.child as child\n"
        "child.KINDS['crash'] = (child.jsonl, lambda path: os.abort() if number() == 2 else None, '')\n"
        "number = lambda: int(Path(sys.argv[2], 'notes.jsonl').read_text().splitlines()[-1].split(',')[0][1:])\n"
        "child.main()\n"
    )
    (tmp_path / "crashing.py").write_text(code)
    monkeypatch.setattr(mutations, "CHILD", tmp_path / "crashing.py")
    outcome = mutations.survey("crash", tmp_path, range(5))
    assert outcome.read == 4 and len(outcome.bad) == 1 and "crash 2: died" in outcome.bad[0]
