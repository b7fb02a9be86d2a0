"""Which files are watched, and how the lines that nothing ran are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checks import fuzz
from benchmarks.checks.covered import ROOT, WATCHED, watched
from benchmarks.fuzzing.mutations import Outcome


def test_the_files_that_matter_are_watched_with_their_missing_lines() -> None:
    def entry(covered: int, lines: int) -> dict[str, object]:
        return {
            "summary": {"num_statements": lines, "covered_lines": covered},
            "missing_lines": [7] * (lines - covered),
        }

    files = {"memory/plan.py": entry(9, 10), "commands/chat.py": entry(0, 5), "data/__init__.py": entry(0, 0)}
    assert watched({"files": files}) == {"memory/plan.py": {"lines": 10, "percent": 90.0, "missing": [7]}}
    assert all(list(ROOT.glob(pattern)) for pattern in WATCHED), "each names a file that is there"


def test_kinds_of_files_take_turns_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, range]] = []
    now = iter(range(100))

    def survey(kind: str, folder: Path, numbers: range) -> Outcome:
        assert folder.is_dir() and not any(folder.iterdir())
        seen.append((kind, numbers))
        return Outcome(1, 2, ["bad"] if kind == "sums" else [])

    monkeypatch.setattr(fuzz, "survey", survey)
    monkeypatch.setattr(fuzz.time, "monotonic", lambda: 60.0 * next(now))
    found, portion = fuzz.run(["sums", "bomb.txt.gz"], minutes=3, first=2)
    assert [(kind, numbers.start) for kind, numbers in seen] == [("sums", 400), ("bomb.txt.gz", 20), ("sums", 600)]
    assert portion == 3 and found["sums"].copies == 8 and found["sums"].bad == ["bad", "bad"]
