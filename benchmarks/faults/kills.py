"""Is anything lost when a run is killed? `python -m benchmarks.faults.kills [--times=100] [--only=NAME+NAME] [--fresh]`.

Every command that writes is killed before and after each change of the disk that it makes (moments that leave the same
disk count once), `times` times at random moments of every part of a run, and as one of two processes; a training run also
loses power at each change. Then the very same command is given again: it has to end with the same files, bit for bit, from
a checkpoint that is whole, with at most one checkpoint interval done twice. Figures go into docs/reliability.md.

One process runs as a fork of a process that has the imports behind it; two are started by torchrun, as users do.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults import warm
from benchmarks.faults.disk_faults import Fault
from benchmarks.faults.kill_cases import SAVE_STEPS, Case, Verdict, World, cases_of, contents, steps_done
from benchmarks.faults.kill_pairs import Pairs
from benchmarks.parts.children import options_of
from benchmarks.parts.results import ROOT, markdown, write_section

FIGURES = ROOT / "data" / "cache" / "kills.json"
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
    seconds: float = 0.0
    judged: dict[str, Verdict] = field(default_factory=dict)  # disks that were looked at

    def add(self, moment: str, verdict: Verdict) -> None:
        """Count a kill and what it has shown."""
        self.kills += 1
        self.most_repeated = max(self.most_repeated, verdict.repeated)
        self.problems += [f"{moment}: {problem}" for problem in verdict.problems]
        for problem in verdict.problems:
            print(f"  {moment}: {problem}", flush=True)


def kill(case: Case, fault: Fault, series: Series, moment: str) -> None:
    """Kill a case once, and judge it."""
    folder = case.world.folder / "now"
    shutil.rmtree(folder, ignore_errors=True)
    case.begin(folder)
    code = case.world.run(folder.name, *case.words(folder), fault=fault)
    if code in KILLED:
        left = f"{steps_done(folder)} {sorted(contents(folder).items())}"
        if left not in series.judged:
            series.judged[left] = case.judge(folder)
        series.add(moment, series.judged[left])
    else:
        series.passed_by += 1
    shutil.rmtree(folder)


def at_every_change(case: Case) -> Series:
    """Before and after each change of the disk."""
    series = Series("")
    for number, is_after in case.moments():
        moment = f"{'after' if is_after else 'before'} {case.trace[number]['change']}"
        kill(case, Fault("kill", number, is_after, is_mirror=case.is_mirror), series, moment)
    return series


def without_power(case: Case) -> Series:
    """The power goes after each change of names, in both worlds."""
    series = Series("")
    last = max((number for number, _ in case.moments()), default=0)
    for number, entry in enumerate(case.trace[: last + 1]):
        if entry["change"].startswith("fsync"):
            continue
        for undoes in (False, True):
            folder = case.world.folder / "now"
            aside = case.world.folder / "aside"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            fault = Fault("power", number, below=str(folder), undoes=undoes, log=str(aside / "old"))
            kill(case, fault, series, f"after {entry['change']}{', undone' * undoes}")
    return series


def at_random(case: Case, place: str, times: int, draw: random.Random) -> Series:
    """Somewhere inside one part of a run."""
    series, durations = Series(""), case.calls(place)
    for _ in range(times):
        call = draw.randrange(len(durations))
        seconds = draw.random() * durations[call]
        kill(case, Fault("kill", function=place, call=call, seconds=seconds), series, f"call {call}, {seconds:.4f} s")
    return series


def of_pairs(world: World, times: int, draw: random.Random) -> Series:
    """As one of two processes, or both."""
    series = Series("")
    for moment, verdict in Pairs(world).kills(times, draw):
        series.add(moment, verdict)
    return series


def all_series(world: World, times: int) -> Iterator[tuple[str, Callable[[], Series]]]:
    """Everything: name, and what does it."""
    cases = cases_of(world)
    for case in cases:
        yield f"{case.name}, at every change", partial(at_every_change, case)
    for case in cases:
        if case.name in POWER_CASES:
            yield f"{case.name}, power lost", partial(without_power, case)
    pairs = round(times * SHARE_OF_PAIRS)
    parts = [(case, place, word) for case in cases for place, word in case.timed.items()]
    for number, (case, place, word) in enumerate(parts):
        share = len(range(number, times - pairs, len(parts)))
        yield f"{word}, at random", partial(at_random, case, place, share, random.Random(number))
    yield "two processes, at random", partial(of_pairs, world, pairs, random.Random(0))


def body(found: list[Series]) -> str:
    """The tables."""
    rows = [[one.name, str(one.kills), str(one.most_repeated), str(len(one.problems))] for one in found]
    minutes = sum(one.seconds for one in found) / 60
    total, wrong = sum(one.kills for one in found), sum(len(one.problems) for one in found)
    told = [f"- {one.name}, {problem}" for one in found for problem in one.problems]
    return "\n".join(
        [
            f"{total} kills in {minutes:.0f} minutes; {wrong} of them left something that is not as in an unbroken run. "
            f"A checkpoint every {SAVE_STEPS} steps; at most so many may be done twice.\n",
            markdown(["killed", "kills", "most steps done twice", "not as unbroken"], rows),
            *(["", *told] if told else []),
        ]
    )


def noted() -> dict[str, Any]:
    """Figures of the series that have ended: name -> fields."""
    return json.loads(FIGURES.read_text(encoding="utf8")) if FIGURES.is_file() else {}


def main(arguments: list[str]) -> int:
    """Run everything that is not noted yet, write the figures, and end with 1 where something was lost."""
    _, options = options_of(arguments, {"times": "100", "only": "", "fresh": "False"}, __doc__ or "")
    if options["fresh"] != "False":
        FIGURES.unlink(missing_ok=True)
    warm.load()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        planned = list(all_series(World(Path(folder)), int(options["times"])))
        for name, work in planned:
            if name in noted() or not name.startswith(tuple(options["only"].split("+"))):
                continue
            began, series = time.monotonic(), work()
            series.name, series.seconds = name, time.monotonic() - began
            print(f"{name}: {series.kills} kills, {len(series.problems)} problems", flush=True)
            series.judged.clear()
            FIGURES.parent.mkdir(parents=True, exist_ok=True)
            FIGURES.write_text(json.dumps({**noted(), name: asdict(series)}, indent=1), encoding="utf8")
    figures = noted()
    found = [Series(**figures[name]) for name, _ in planned if name in figures]
    if len(found) == len(planned):
        write_section("kills", "Kills and losses of power", body(found), figures, PAGE)
    return int(any(one.problems for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
