"""No damaged file ends the interpreter or gives a traceback: it is read, or a sentence says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzzing import mutations

# kinds that once crashed the interpreter, and one of each trade; `python -m benchmarks.checks.fuzz` has all kinds
# and runs as long as it is asked to
KINDS = ("a.arrow", "a.parquet", "spiece", "state", "a.json")


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_copies_are_read_or_told(tmp_path: Path, kind: str) -> None:
    outcome = mutations.survey(kind, tmp_path, range(8))
    assert not outcome.bad, "\n".join(outcome.bad)
    assert outcome.read and outcome.told
