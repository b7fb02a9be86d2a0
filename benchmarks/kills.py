"""Is anything lost when a run is killed? `python -m benchmarks.kills [--times=100] [--only=CASE,...]`.

Every command that writes is killed before and behind each change of the disk that it makes (moments that leave the same
disk count once), `times` times at random moments of every part of a run, and as one of two processes; a training run also
loses power at each change. Then the very same command is given again: it has to end with the same files, bit for bit, from
a checkpoint that is whole, with at most one checkpoint interval done twice. Figures go into docs/reliability.md.

One process runs as a fork of a process that has the imports behind it; two are started by torchrun, as users do.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import warm
from benchmarks.children import options_of
from benchmarks.disk_faults import Fault
from benchmarks.kill_cases import SAVE_STEPS, Case, Verdict, World, cases_of
from benchmarks.kill_pairs import Pairs
from benchmarks.results import ROOT, markdown, write_section

PAGE = ROOT / "docs" / "reliability.md"
KILLED = (-9, -27)  # SIGKILL, SIGPROF
POWER_CASES = ("train", "resume", "prepare", "tokenizer")
SHARE_OF_PAIRS = 0.1


@dataclass
class Series:
    """Kills of one kind."""

    name: str
    kills: int = 0
    passed_by: int = 0  # the process had ended before its moment
    most_repeated: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, moment: str, verdict: Verdict) -> None:
        """Count a kill and what it has shown."""
        self.kills += 1
        self.most_repeated = max(self.most_repeated, verdict.repeated)
        self.problems += [f"{moment}: {problem}" for problem in verdict.problems]
        for problem in verdict.problems:
            print(f"  {self.name}, {moment}: {problem}", flush=True)


def kill(case: Case, fault: Fault, series: Series, moment: str) -> None:
    """Kill a case once, and judge it."""
    folder = case.world.folder / "now"
    shutil.rmtree(folder, ignore_errors=True)
    case.begin(folder)
    code = case.world.run(folder.name, *case.words(folder), fault=fault)
    if code in KILLED:
        series.add(moment, case.judge(folder))
    else:
        series.passed_by += 1
    shutil.rmtree(folder)


def at_every_change(case: Case) -> Series:
    """Before and behind each change of the disk."""
    series = Series(f"{case.name}, at every change")
    for number, is_after in case.moments():
        moment = f"{'behind' if is_after else 'before'} {case.trace[number]['change']}"
        kill(case, Fault("kill", number, is_after, is_mirror=case.is_mirror), series, moment)
    return series


def without_power(case: Case) -> Series:
    """The power goes behind each change of names, in both worlds."""
    series = Series(f"{case.name}, power lost")
    changes = [number for number, entry in enumerate(case.trace) if not entry["change"].startswith("fsync")]
    last = max((number for number, _ in case.moments()), default=0)
    for number in (number for number in changes if number <= last):
        for undoes in (False, True):
            folder = case.world.folder / "now"
            aside = case.world.folder / "aside"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            fault = Fault("power", number, below=str(folder), undoes=undoes, log=str(aside / "old"))
            kill(case, fault, series, f"behind {case.trace[number]['change']}{', undone' * undoes}")
    return series


def at_random(cases: list[Case], times: int, draw: random.Random) -> Iterator[Series]:
    """Somewhere inside each part of a run, in turn."""
    parts = [(case, place, word) for case in cases for place, word in case.timed.items()]
    for number, (case, place, word) in enumerate(parts):
        series = Series(f"{word}, at random")
        durations = case.calls(place)
        for _ in range(number, times, len(parts)):
            call = draw.randrange(len(durations))
            seconds = draw.random() * durations[call]
            kill(case, Fault("kill", function=place, call=call, seconds=seconds), series, f"call {call}, {seconds:.4f} s")
        yield series


def all_series(folder: Path, times: int, only: list[str]) -> Iterator[Series]:
    """Everything, one series after the other."""
    world, draw = World(folder), random.Random(0)
    cases = [case for case in cases_of(world) if not only or case.name in only]
    for case in cases:
        case.prepare()
    for case in cases:
        yield at_every_change(case)
    for case in cases:
        if case.name in POWER_CASES:
            yield without_power(case)
    pairs = round(times * SHARE_OF_PAIRS)
    yield from at_random(cases, times - pairs, draw)
    if not only or "pairs" in only:
        series = Series("two processes, at random")
        for moment, verdict in Pairs(world).kills(pairs, draw):
            series.add(moment, verdict)
        yield series


def body(found: list[Series], seconds: float) -> str:
    """The tables."""
    rows = [[one.name, str(one.kills), str(one.most_repeated), str(len(one.problems))] for one in found]
    total, wrong = sum(one.kills for one in found), sum(len(one.problems) for one in found)
    told = [f"- {one.name}, {problem}" for one in found for problem in one.problems]
    return "\n".join(
        [
            f"{total} kills in {seconds / 60:.0f} minutes; {wrong} of them left something that is not as in an unbroken run. "
            f"A checkpoint every {SAVE_STEPS} steps; at most so many may be done twice.\n",
            markdown(["killed", "kills", "most steps done twice", "not as unbroken"], rows),
            *(["", *told] if told else []),
        ]
    )


def main(arguments: list[str]) -> int:
    """Run everything, write the figures, and end with 1 where something was lost."""
    _, options = options_of(arguments, {"times": "100", "only": ""}, __doc__ or "")
    warm.load()
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        for series in all_series(Path(folder), int(options["times"]), [name for name in options["only"].split(",") if name]):
            print(f"{series.name}: {series.kills} kills, {len(series.problems)} problems", flush=True)
            found.append(series)
    seconds = time.monotonic() - began
    if not options["only"]:
        write_section(
            "kills", "Kills and losses of power", body(found, seconds), [asdict(one) for one in found], PAGE
        )
    return int(any(one.problems for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
