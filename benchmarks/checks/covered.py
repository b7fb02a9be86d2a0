"""Lines that no test runs: `make coverage`, or `python -m benchmarks.checks.covered [--more] [-- words for pytest]`.

Runs the tests with every line counted, in child processes as well, and tells of the files in which a mistake would cost
most (settings, memory, data, devices, checkpoints) the lines that nothing ran. Exit code 1 where one of them has less
than `LEAST` of its lines run. With `--more` it adds to what earlier calls have counted, so that a long suite may be run
folder by folder; without, it begins anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.parts.results import ROOT, write_figures

COUNTED = ROOT / "data" / "cache" / "coverage"
LEAST = 90.0  # percent of the lines of each file
WATCHED = (
    "settings/*.py", "units.py", "config.py", "limits.py", "screen.py", "memory/*.py", "data/*.py",
    "devices/*.py",
    "training/checkpoints/*.py",
)  # fmt: skip


def measured(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the tests and return what `coverage json` says, of earlier ones in the same folder as well."""
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "data"), "OMP_NUM_THREADS": "1"}

    def coverage(*rest: str) -> int:
        return subprocess.run([sys.executable, "-m", "coverage", *rest], cwd=ROOT, env=environment).returncode

    if coverage("run", "-m", "pytest", *words):
        for part in folder.glob("data.*"):
            part.unlink()
        raise SystemExit("the tests failed; what they ran says nothing")
    coverage("combine", "--quiet", "--append", str(folder))
    coverage("json", "--quiet", "-o", str(folder / "coverage.json"))
    return dict(json.loads((folder / "coverage.json").read_text(encoding="utf8")))


def watched(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """File -> lines, percent that ran, and the numbers of those that did not; of the files that are watched."""
    found = {}
    for file, entry in sorted(report["files"].items()):
        summary = entry["summary"]
        if summary["num_statements"] and any(fnmatch(file, pattern) for pattern in WATCHED):
            percent = round(100 * summary["covered_lines"] / summary["num_statements"], 1)
            found[file] = {
                "lines": summary["num_statements"],
                "percent": percent,
                "missing": entry["missing_lines"],
            }
    return found


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    if "--more" not in sys.argv[1:at]:
        shutil.rmtree(COUNTED, ignore_errors=True)
    COUNTED.mkdir(parents=True, exist_ok=True)
    report = measured(sys.argv[at + 1 :], COUNTED)
    files = watched(report)
    for file, entry in files.items():
        if entry["missing"]:
            print(f"{entry['percent']:5.1f}% {file}: {', '.join(map(str, entry['missing']))}")
    lines = sum(entry["lines"] for entry in files.values())
    missing = sum(len(entry["missing"]) for entry in files.values())
    low = [file for file, entry in files.items() if entry["percent"] < LEAST]
    print(f"{lines - missing} of {lines} lines ran, {100 * (1 - missing / lines):.1f}%; below {LEAST:.0f}%: {', '.join(low) or 'none'}")  # fmt: skip
    write_figures(
        "coverage",
        {
            "files": len(files), "lines": lines, "ran": lines - missing, "percent": round(100 * (1 - missing / lines), 1),
            "least": min(entry["percent"] for entry in files.values()), "by_file": files,
        },
    )  # fmt: skip
    return int(bool(low))


if __name__ == "__main__":
    raise SystemExit(main())
