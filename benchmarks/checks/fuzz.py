"""Damaged and hostile files against every reader: `python -m benchmarks.checks.fuzz --minutes=60
[--kinds=a.parquet,sums] [--first=0]`.

All kinds of files that this program reads take turns, a portion of copies of each, until the time is up: damaged copies
of sound ones, and sound ones that are absurd (see `benchmarks/fuzzing/mutations.py`). Each is read, or told in a
sentence; a traceback, a crash of the interpreter and more memory than a reader may take are findings, and give the exit
code 1. Copy N of a kind is the same in every run; `--first` names the portion to go on with.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from benchmarks.fuzzing.child import BUDGET, KINDS, STRANGE
from benchmarks.fuzzing.mutations import Outcome, survey
from benchmarks.page import write_figures

PORTION, PORTION_OF_STRANGE = 200, 10  # the absurd ones are large


def run(kinds: Sequence[str], minutes: float, first: int = 0) -> tuple[dict[str, Outcome], int]:
    """Survey kinds in turn until the time is up.

    Args:
        first: the first portion of each kind, counted from 0.
    Returns:
        what came of each, and the portion at which it ended.
    """
    end, found = time.monotonic() + 60 * minutes, {kind: Outcome() for kind in kinds}
    for portion in count(first):
        for kind in kinds:
            if time.monotonic() > end:
                return found, portion
            copies = PORTION_OF_STRANGE if kind in STRANGE else PORTION
            with tempfile.TemporaryDirectory() as folder:
                outcome = survey(kind, Path(folder), range(portion * copies, (portion + 1) * copies))
            print(f"{kind}, portion {portion}: {outcome}", *outcome.bad, sep="\n  ", flush=True)
            found[kind] += outcome
    raise AssertionError("counting has no end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kinds", default=",".join((*KINDS, *STRANGE)))
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    began = time.monotonic()
    found, last = run(asked.kinds.split(","), asked.minutes, asked.first)
    total = sum(found.values(), Outcome())
    print(f"all: {total}")
    write_figures(
        "fuzz",
        {
            "minutes": round((time.monotonic() - began) / 60),
            "kinds": len(found),
            "portions": [asked.first, last],
            "copies": total.copies,
            "read": total.read,
            "told": total.told,
            "bad": total.bad,
            "budget_bytes": BUDGET,
            "by_kind": {kind: {"read": o.read, "told": o.told, "bad": len(o.bad)} for kind, o in found.items()},
        },
    )
    return int(bool(total.bad))


if __name__ == "__main__":
    raise SystemExit(main())
