"""Runs killed at random moments and continued: `python -m benchmarks.faults.kills [--times=100] [--only=NAME+NAME]
[--fresh]`.

Every command that writes is killed before and after each change of the disk that it makes (moments that leave the same
disk count once), `times` times at random moments of every part of a run, and as one of two processes; a training run
also loses power at each change. Then the very same command is given again: it has to end with the same files, bit for
bit, from a checkpoint that is whole, with at most one checkpoint interval done twice. Figures go into
docs/reliability.md.

One process runs as a fork of a process that has the imports behind it; two are started by torchrun, as users do. Each
kill is noted at once, below data/cache/kills: given again, the command goes on behind the last one, `--fresh` begins
anew.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.faults import warm
from benchmarks.faults.disk_faults import Fault
from benchmarks.faults.kill_cases import SAVE_STEPS, Case, Moment, Verdict, World
from benchmarks.faults.kill_pairs import Pairs
from benchmarks.faults.killed_commands import cases_of
from benchmarks.page import ROOT, markdown, write_part
from benchmarks.parts.children import options_of
from support.storage import write_text

NOTES = ROOT / "data" / "cache" / "kills"  # a file for each series, rewritten after each kill
PAGE = ROOT / "docs" / "reliability.md"
KILLED = (-9, -27)  # SIGKILL, SIGPROF
POWER_CASES = ("train", "resume", "prepare", "tokenizer", "dpo")
SHARE_OF_PAIRS = 0.1


@dataclass
class Series:
    """Kills of one kind; what is noted of it is where it goes on after it was stopped itself."""

    name: str
    kills: int = 0
    passed_by: int = 0  # the process had ended before its moment
    most_repeated: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    is_done: bool = False
    when: str = ""

    @property
    def place(self) -> Path:
        """Where it is noted."""
        return NOTES / f"{self.name.replace(', ', '-').replace(' ', '_')}.json"

    @classmethod
    def noted(cls, name: str) -> Series:
        """As far as it has come; new where it has not begun."""
        place = cls(name).place
        return cls(**json.loads(place.read_text(encoding="utf8"))) if place.is_file() else cls(name)

    def note(self) -> None:
        """Keep it."""
        self.place.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.place, json.dumps(asdict(self), indent=1))

    def add(self, moment: str, verdict: Verdict | None) -> None:
        """Count a kill and what it has shown; None: the process had ended before."""
        if verdict is None:
            self.passed_by += 1
            return
        self.kills += 1
        self.most_repeated = max(self.most_repeated, verdict.repeated)
        self.problems += [f"{moment}: {problem}" for problem in verdict.problems]
        for problem in verdict.problems:
            print(f"  {moment}: {problem}", flush=True)

    def run(self, moments: Iterable[Moment]) -> None:
        """Kill at each of these, but for those that are noted already."""
        if self.is_done:
            return
        for number, (moment, kill) in enumerate(moments):
            if number < self.kills + self.passed_by:
                continue
            began = time.monotonic()
            self.add(moment, kill())
            self.seconds, self.when = self.seconds + time.monotonic() - began, time.strftime("%Y-%m-%d")
            self.note()
        self.is_done = True
        self.note()
        print(f"{self.name}: {self.kills} kills, {len(self.problems)} problems", flush=True)


def kill(case: Case, fault: Fault) -> Verdict | None:
    """Kill a case once, and judge it; None where it had ended before."""
    folder = case.world.folder / "now"
    shutil.rmtree(folder, ignore_errors=True)
    case.begin(folder)
    code = case.world.run(folder.name, *case.words(folder), fault=fault)
    verdict = case.verdict(folder) if code in KILLED else None
    shutil.rmtree(folder)
    return verdict


def at_every_change(case: Case) -> Iterator[Moment]:
    """Before and after each change of the disk."""
    for number, is_after in case.moments():
        moment = f"{'after' if is_after else 'before'} {case.trace[number]['change']}"
        yield moment, partial(kill, case, Fault("kill", number, is_after))


def without_power(case: Case) -> Iterator[Moment]:
    """The power goes after each change of names, in both worlds."""
    last = max((number for number, _ in case.moments()), default=0)
    folder, aside = case.world.folder / "now", case.world.folder / "aside"
    aside.mkdir(exist_ok=True)
    for number, entry in enumerate(case.trace[: last + 1]):
        if entry["change"].startswith("fsync"):
            continue
        for undoes in (False, True):
            for old in aside.iterdir():
                old.unlink()
            fault = Fault("power", number, below=str(folder), undoes=undoes, log=str(aside / "old"))
            yield f"after {entry['change']}{', undone' * undoes}", partial(kill, case, fault)


def at_random(case: Case, place: str, times: int, draw: random.Random) -> Iterator[Moment]:
    """Somewhere inside one part of a run."""
    durations = case.calls(place)
    for _ in range(times):
        call = draw.randrange(len(durations))
        seconds = draw.random() * durations[call]
        fault = Fault("kill", function=place, call=call, seconds=seconds)
        yield f"call {call}, {seconds:.4f} s", partial(kill, case, fault)


def all_series(world: World, times: int) -> Iterator[tuple[str, Callable[[], Iterable[Moment]]]]:
    """Everything: name, and what gives its moments."""
    cases = cases_of(world)
    pairs = round(times * SHARE_OF_PAIRS)
    parts = [(case, place, word) for case in cases for place, word in case.timed.items()]
    for number, (case, place, word) in enumerate(parts):
        share = len(range(number, times - pairs, len(parts)))
        yield f"{word}, at random", partial(at_random, case, place, share, random.Random(number))
    yield "two processes, at random", lambda: Pairs(world).moments(pairs, random.Random(0))
    for case in cases:
        yield f"{case.name}, at every change", partial(at_every_change, case)
    for case in cases:
        if case.name in POWER_CASES:
            yield f"{case.name}, power lost", partial(without_power, case)


def body(found: list[Series]) -> str:
    """The tables."""
    rows = [
        [
            one.name if one.is_done else f"{one.name} (not at its end)",
            str(one.kills),
            str(one.most_repeated),
            str(len(one.problems)),
        ]
        for one in found
        if one.kills
    ]
    missing = [one.name for one in found if not one.kills]
    minutes = sum(one.seconds for one in found) / 60
    total, wrong = sum(one.kills for one in found), sum(len(one.problems) for one in found)
    told = [f"- {one.name}, {problem}" for one in found for problem in one.problems]
    return "\n".join(
        [
            f"{total} kills in {minutes:.0f} minutes; {wrong} of them left a difference from an undisturbed run. "
            f"A checkpoint every {SAVE_STEPS} steps; at most that many may be repeated.\n",
            markdown(["killed", "kills", "most repeated steps", "differences"], rows),
            *([f"\nNot yet run: {'; '.join(missing)}."] if missing else []),
            *(["", *told] if told else []),
        ]
    )


def main(arguments: list[str]) -> int:
    """Run everything that is not noted yet, write the figures, and end with 1 where something was lost."""
    _, options = options_of(arguments, {"times": "100", "only": "", "fresh": "False"}, __doc__ or "")
    if options["fresh"] != "False":
        shutil.rmtree(NOTES, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        world = World(Path(folder))
        planned = list(all_series(world, int(options["times"])))
        for name, moments in planned:
            series = Series.noted(name)
            if not series.is_done and name.startswith(tuple(options["only"].split("+"))):
                warm.load()
                world.make()
                series.run(moments())
    found = [Series.noted(name) for name, _ in planned]
    write_part(PAGE, "kills", "Kills and power losses", body(found), [asdict(one) for one in found])
    return int(any(one.problems for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
