"""Mutation testing: `python -m benchmarks.checks.mutants --times=300 [--processes=2] [--only=memory/plan.py]
[--again]`.

Slips (`slips.py`) are made one at a time in a copy of everything, and the tests that know the file (`asked.py`) are
run: where they pass, the change is a survivor, told with its line. What is tried is noted at once, below data/cache,
and not tried a second time while the function around it stays as it is. `--again` tries what has survived, against more
tests and those written since; what can change nothing is in `equivalent.py`, with the reason. The figures go into
docs/reliability.md. Works where processes can fork.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checks.asked import noticed_by
from benchmarks.checks.equivalent import SAME
from benchmarks.checks.slips import Mutant, drawn, source_of
from benchmarks.page import ROOT, markdown, write_part

MOST_TEST_FILES, MOST_AGAIN = 3, 8  # of a mutant; of one that has survived the first ones
PROCESSOR_SECONDS, CLOCK_SECONDS, GIGABYTES = 120, 1200, 6  # of one attempt
NOTES = ROOT / "data" / "cache" / "mutants.jsonl"
PAGE = ROOT / "docs" / "reliability.md"
UNCHANGED = -1  # the number of no node
PASSED, NO_TESTS, NOT_RUN = 0, 5, 70
WARM = ("torch", "numpy", "pyarrow.parquet", "pytest", "safetensors.torch", "accelerate")


def noted() -> dict[str, list[bool]]:
    """What was tried: key -> whether it survived, each time."""
    lines = NOTES.read_text(encoding="utf8").splitlines() if NOTES.is_file() else []
    found: dict[str, list[bool]] = {}
    for key, survived in map(json.loads, lines):
        found.setdefault(key, []).append(survived)
    return found


def note(mutant: Mutant, survived: bool) -> None:
    """Keep what came of a change."""
    NOTES.parent.mkdir(parents=True, exist_ok=True)
    with NOTES.open("a", encoding="utf8") as file:
        file.write(json.dumps([mutant.key, survived], ensure_ascii=False) + "\n")


def try_out(mutant: Mutant, tests: Sequence[str], copy_of_all: Path) -> int:
    """Run the tests in a forked process; returns its number, which is that of its group too."""
    if mutant.node != UNCHANGED:
        (copy_of_all / mutant.file).write_text(source_of(mutant), encoding="utf8")
    if pid := os.fork():
        return pid
    import resource

    import pytest

    os.setpgid(0, 0)
    signal.alarm(CLOCK_SECONDS)  # a change may wait for good
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES * 1024**3,) * 2)  # or ask for a thousand times the memory
    sink = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(sink, handle)
    os.chdir(copy_of_all)
    os.environ["PYTHONPATH"] = str(copy_of_all)
    sys.path[0] = str(copy_of_all)
    code = NOT_RUN
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(copy_of_all), *tests]))
    finally:
        os._exit(code)


def try_all(
    mutants: Sequence[Mutant],
    processes: int,
    tell: Callable[[Mutant, bool], None],
    minutes: float = math.inf,
    most: int = MOST_TEST_FILES,
) -> None:
    """Try mutants, a few side by side, until all are tried or the time is up.

    Args:
        tell: called with each that was tried, and whether it survived. most: files of tests that are asked.
    """
    left, running = list(reversed(mutants)), dict[int, tuple[Mutant, Path]]()
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        free = [Path(folder, str(number)) for number in range(processes)]
        for place in free:
            shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(".git", ".venv", "logs", "cache", "__pycache__"))
        while left or running:
            if time.monotonic() > end:
                left.clear()
            if left and free:
                mutant, place = left.pop(), free.pop()
                tests = noticed_by(mutant.file, most)
                running[try_out(mutant, tests, place)] = (mutant, place)
                continue
            pid, status = os.wait()
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what its tests have started
            mutant, place = running.pop(pid)
            shutil.copyfile(ROOT / mutant.file, place / mutant.file)
            free.append(place)
            code = os.waitstatus_to_exitcode(status)
            assert code != NOT_RUN, f"the tests of {mutant.file} cannot be run"
            if code != -signal.SIGALRM:  # a machine that was busy for long has not noticed anything
                tell(mutant, code in (PASSED, NO_TESTS))


def told(mutant: Mutant, survived: bool) -> None:
    """On the screen, and in the notes."""
    word = "SURVIVED" if survived else "noticed"
    print(f"{word} {mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)
    note(mutant, survived)


def figures(every: Sequence[Mutant]) -> dict[str, Any]:
    """What is known of all of these."""
    known = noted()
    tried = {mutant: known[mutant.key] for mutant in every if mutant.key in known}
    first = [mutant for mutant, results in tried.items() if results[0]]
    lost = [mutant for mutant, results in tried.items() if results[-1]]
    same = {mutant: SAME[mutant.parts] for mutant in lost if mutant.parts in SAME}
    counted = {
        "tried": Counter(map(_wing, tried)),
        "survived_at_first": Counter(map(_wing, first)),
        "noticed_since": Counter(_wing(mutant) for mutant in first if mutant not in lost),
        "equivalent": Counter(map(_wing, same)),
        "left": Counter(_wing(mutant) for mutant in lost if mutant not in same),
    }
    return {
        "possible": len(every),
        **{name: count.total() for name, count in counted.items()},
        "by_wing": {wing: {name: count[wing] for name, count in counted.items()} for wing in sorted(counted["tried"])},
        "survivors": [{**asdict(mutant), "equivalent": same.get(mutant, "")} for mutant in lost],
    }


def _wing(mutant: Mutant) -> str:
    return "checkpoints" if mutant.file.startswith(("training/", "model/")) else mutant.file.split("/")[0]


def body(found: dict[str, Any]) -> str:
    """What is said of the figures, as Markdown."""
    titles = {
        "tried": "tried",
        "survived_at_first": "survived the first tests run",
        "noticed_since": "of these found by more tests, or by new ones",
        "equivalent": "no effect on a guarantee",
        "left": "left",
    }
    rows = [[wing, *(str(counts[name]) for name in titles)] for wing, counts in found["by_wing"].items()]
    rows.append(["in all", *(str(found[name]) for name in titles)])
    return f"{found['tried']} of {found['possible']} possible changes, drawn by their names.\n\n" + markdown(
        ["where", *titles.values()], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=300, help="how many are known of in the end")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    for module in WARM:
        __import__(module)
    every, known = drawn([pattern for pattern in asked.only.split(",") if pattern]), noted()
    if asked.again:
        wanted = [mutant for mutant in every if known.get(mutant.key, [False])[-1] and mutant.parts not in SAME]
    else:
        wanted = [mutant for mutant in every if mutant.key not in known][: max(0, asked.times - len(known))]
    if wanted:
        sound, passed = Mutant(wanted[0].file, UNCHANGED, 0, "nothing", "nothing", "", ""), list[bool]()
        try_all([sound], 1, lambda _, survived: passed.append(survived))
        assert passed == [True], f"the tests of {sound.file} fail as it is"
    try_all(wanted, asked.processes, told, asked.minutes, MOST_AGAIN if asked.again else MOST_TEST_FILES)
    found = figures(drawn([]))
    print(
        f"{found['tried']} of {found['possible']} tried, {found['survived_at_first']} survived at first, "
        f"{found['left']} left"
    )
    write_part(PAGE, "mutants", "Mutation tests", body(found), found)


if __name__ == "__main__":
    main()
