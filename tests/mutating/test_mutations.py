"""No damaged or hostile file ends the interpreter or gives a traceback: it is read, or a sentence says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutating import mutations
from tests.mutating.mutated_child import KINDS
from tests.mutating.mutations import survey

FEW, MANY = 12, 600
# the kinds that once crashed the interpreter, and some of each trade; all are in the long run
QUICK = ("a.arrow", "stream.arrow", "a.parquet", "a.jsonl", "regex", "spiece", "pairs", "manifest", "state", "a.json")


@pytest.mark.parametrize("kind", QUICK)
def test_mutated_copies_are_read_or_told(tmp_path: Path, kind: str) -> None:
    outcome = survey(kind, tmp_path, range(FEW if kind not in ("a.arrow", "stream.arrow", "pairs") else 5 * FEW))
    assert not outcome.bad, "\n".join(outcome.bad)
    assert outcome.read and outcome.told


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_copies_are_read_or_told(tmp_path: Path, kind: str) -> None:
    outcome = survey(kind, tmp_path, range(MANY))
    assert not outcome.bad, "\n".join(outcome.bad)
    print(f"{kind}: {outcome}")


def test_a_crash_of_the_child_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The survey itself: a child that dies is bad, and the copies after it are still opened."""
    code = (
        "import os, sys; from pathlib import Path; import tests.mutating.mutated_child as child\n"
        "child.KINDS['crash'] = (child.jsonl, lambda path: os.abort() if number() == 2 else None, '')\n"
        "number = lambda: int(Path(sys.argv[2], 'notes.jsonl').read_text().splitlines()[-1].split(',')[0][1:])\n"
        "child.main()\n"
    )
    (tmp_path / "crashing.py").write_text(code)
    monkeypatch.setattr(mutations, "CHILD", tmp_path / "crashing.py")
    outcome = survey("crash", tmp_path, range(5))
    assert outcome.read == 4 and len(outcome.bad) == 1 and "crash 2: died" in outcome.bad[0]
