"""Commands to kill, what must be intact afterwards, and the result of the same command given again.

A case is a command of the program in a folder of its own, and an unbroken run of it to be compared with. Every file
that the unbroken run leaves has to be there again, bit for bit, but for those that hold times and places.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults import warm
from benchmarks.faults.disk_faults import Fault
from benchmarks.parts.children import TINY_BLOCKS
from benchmarks.parts.rows import read_rows, write_rows
from model.formats.checksums import CARD_FILE, damages
from training.checkpoints.folder import Checkpoints, step_of
from training.report.run_files import METRICS_FILE, EventReader

STEPS, SAVE_STEPS, RUN = 8, 3, "r"
KEEP, KEEP_ALL = "--keep_latest_n_ckp=1", "--keep_latest_n_ckp=99"
SHAPE = (*TINY_BLOCKS, "--vocab_size=1056")
WORK = (
    "--max_seq_len=64",
    f"--max_steps={STEPS}",
    f"--save_steps={SAVE_STEPS}",
    "--eval_steps=4",
    "--eval_rows=8",
    "--effective_batch_size=7",
    "--mixed_precision=no",
    "--seed=5",
    "--sample_rows=0",
    "--log_steps=1",
    "--memory_budget=4G",
    "--memory_mode=low",
    KEEP,  # what malloc keeps follows the measured peak, which may change from run to run
)
CHANGING = ("run.json", "settings.json")  # times and places
MEASURED = (b"| planned peak |", b"| measured peak |", b"| time")  # lines of a model's card
HIDDEN = (".tmp-", ".old-", ".partial", ".tmp", "owner.json")
WORDS = (
    "the",
    "river",
    "runs",
    "under",
    "a",
    "stone",
    "bridge",
    "where",
    "small",
    "boats",
    "wait",
    "for",
    "morning",
    "light",
)
Words = tuple[str, ...]
LOGS = "logs/"  # The files of a folder with times in them.


@dataclass
class Verdict:
    """What a kill has shown: sentences of what is wrong, and the steps that were done twice."""

    problems: list[str] = field(default_factory=list)
    repeated: int = 0


Moment = tuple[str, Callable[[], Verdict | None]]  # in words, and what kills there


class World:
    """Text, preferences, caches and a model to go on from, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Put it all there; once."""
        folder, draw = self.folder, random.Random(7)
        if (folder / "text.txt").is_file():
            return
        (folder / "text.txt").write_text(
            "".join(" ".join(draw.choices(WORDS, k=draw.randint(5, 40))) + "\n" for _ in range(400)), encoding="utf8"
        )
        rows = [
            {"prompt": f"is {word} {number}?", "chosen": f"yes, {word}", "rejected": f"no, not {word} at all"}
            for number, word in ((number, WORDS[number % len(WORDS)]) for number in range(100))
        ]
        write_rows(folder / "preferences.jsonl", rows)
        self.run("base", *self.train(folder / "base"))

    @property
    def cache(self) -> Path:
        """Where text is prepared once for all cases."""
        return self.folder / "cache"

    def train(self, folder: Path, *more: str) -> Words:
        """The command that trains in a folder, and goes on with what it finds there."""
        return ("train", f"--train_file={self.folder / 'text.txt'}", *SHAPE, *WORK, *self.places(folder), *more)

    def places(self, folder: Path) -> Words:
        """Where a run reads and writes."""
        return (
            f"--output_dir={folder / 'runs'}",
            f"--log_dir={folder / 'logs'}",
            f"--cache_dir={self.cache}",
            f"--run_name={RUN}",
            "--is_keep_training=auto",
            "--num_threads=1",
        )

    def run(self, name: str, *words: str, fault: Fault | None = None) -> int:
        """Run a command; its screen is kept under the name. Raises where one without a fault fails."""
        screen = self.folder / f"{name}.screen"
        code = warm.run(words, screen, fault)
        assert code == 0 or fault is not None, screen.read_text(encoding="utf8")
        return code


@dataclass
class Case:
    """A command, and how it is judged.

    Args:
        words: the command for a folder. begin: fills that folder before. until: of the changes of the disk, those up to
            the first that holds this text are killed at; none: all.
        timed: functions inside which it is killed at random: `module:name` -> word for it.
    """

    name: str
    world: World
    words: Callable[[Path], Words]
    timed: dict[str, str]
    begin: Callable[[Path], None] = lambda folder: folder.mkdir()
    until: str = ""
    trace: list[dict[str, Any]] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    _every: dict[str, str] = field(default_factory=dict)
    _judged: dict[str, Verdict] = field(default_factory=dict)  # disks that were looked at

    def prepare(self) -> None:
        """Run it unbroken, with a list of its changes; once."""
        if self.whole:
            return
        folder = self.world.folder / f"{self.name}-whole"
        self.begin(folder)
        log = self.world.folder / f"{self.name}.trace"
        fault = Fault("trace", log=str(log), below=str(folder))
        code = self.world.run(f"{self.name}-whole", *self.words(folder), fault=fault)
        assert code == 0, f"{self.name}: the unbroken run ended with {code}"
        self.trace = read_rows(log)
        self.whole = contents(folder)

    def moments(self) -> list[tuple[int, bool]]:
        """Before or after which change: one for each state of the disk that a kill can leave."""
        self.prepare()
        found: dict[int, tuple[int, bool]] = {}
        for number, entry in enumerate(self.trace):
            for is_after, state in zip((False, True), entry["states"], strict=True):
                found.setdefault(state, (number, is_after))
            if self.until and self.until in entry["change"]:
                break
        return sorted(found.values())

    def calls(self, place: str) -> list[float]:
        """Processor seconds of each call of a function in an unbroken run."""
        self.prepare()
        folder = self.world.folder / f"{self.name}-{place.rpartition('.')[2].rpartition(':')[2]}"
        self.begin(folder)
        log = folder.with_suffix(".calls")
        code = self.world.run(folder.name, *self.words(folder), fault=Fault("trace", function=place, log=str(log)))
        assert code == 0
        shutil.rmtree(folder)
        return [float(line) for line in log.read_text().splitlines()]

    def to_end(self, folder: Path, words: Words) -> tuple[int, str]:
        """Run the command undisturbed; its exit code and its screen."""
        code = self.world.run(folder.name, *words, fault=Fault("none"))
        return code, (self.world.folder / f"{folder.name}.screen").read_text(encoding="utf8")

    def verdict(self, folder: Path) -> Verdict:
        """The same, where no kill before has left the very same disk."""
        left = f"{steps_done(folder)} {sorted(contents(folder).items())}"
        if left not in self._judged:
            self._judged[left] = self.judge(folder)
        return self._judged[left]

    def judge(self, folder: Path) -> Verdict:
        """Look at what the kill has left, give the command again, and compare."""
        verdict = Verdict()
        trains = self.words(folder)[0] in ("train", "dpo")
        chosen = self._look(folder, verdict) if trains else 0
        done = steps_done(folder)
        code, screen = self.to_end(folder, self.words(folder))
        if code != 0:
            verdict.problems.append(f"given again, it ended with {code}: {screen[-300:]}")
            return verdict
        found = contents(folder)
        differing = [name for name in {**found, **self.whole} if found.get(name) != self.whole.get(name)]
        if differing:
            verdict.problems.append(
                f"{len(differing)} files differ from an undisturbed run: {', '.join(differing[:4])}"
            )
        left = [path.name for path in folder.rglob("*") if any(sign in path.name for sign in HIDDEN)]
        if left:
            verdict.problems.append(f"left behind: {', '.join(left)}")
        if trains:
            begun = started_at(folder)
            verdict.repeated = max(0, done - begun)
            if verdict.repeated > SAVE_STEPS:
                verdict.problems.append(f"{verdict.repeated} steps were done twice")
            if begun != chosen:
                verdict.problems.append(f"went on from step {begun}, where {chosen} is whole")
        return verdict

    def _look(self, folder: Path, verdict: Verdict) -> int:
        """The step that a run will go on from; its checkpoint has to be that of the unbroken run."""
        run = folder / "runs" / RUN
        for path in (run / "checkpoints").glob("step_*"):
            if found := damages(path):
                verdict.problems.append(f"{path.name} is torn: {found[0]}")
        latest = Checkpoints(run, 1).latest()
        if latest is None:
            return 0
        ours = contents(latest)
        wrong = [name for name, digest in ours.items() if self.every.get(f"{latest.name}/{name}") != digest]
        if wrong:
            verdict.problems.append(f"{latest.name} is another than that of the unbroken run: {', '.join(wrong)}")
        return step_of(latest)

    @property
    def every(self) -> dict[str, str]:
        """Digests of all checkpoints of an unbroken run that keeps them."""
        folder = self.world.folder / f"{self.name}-every"
        if not folder.is_dir():
            self.begin(folder)
            code, screen = self.to_end(folder, tuple(KEEP_ALL if word == KEEP else word for word in self.words(folder)))
            assert code == 0, screen
            self._every = contents(folder / "runs" / RUN / "checkpoints")
        return self._every


def contents(folder: Path) -> dict[str, str]:
    """Name -> digest of each file below a folder, or where a link leads; what tells times and places left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file() and path.name not in CHANGING and not name.startswith(LOGS) and path.suffix != ".lock":
            found[name] = hashlib.sha256(_lasting(path)).hexdigest()
    return found


def _lasting(path: Path) -> bytes:
    """The content of a file; a model's card also tells times and peaks, which no two runs have alike."""
    content = path.read_bytes()
    if path.name != CARD_FILE:
        return content
    return b"".join(line for line in content.splitlines(keepends=True) if not line.startswith(MEASURED))


def _events(folder: Path) -> list[dict[str, Any]]:
    metrics = folder / "logs" / RUN / METRICS_FILE
    return list(EventReader(metrics).events()) if metrics.is_file() else []


def steps_done(folder: Path) -> int:
    """The last step that a run has told of."""
    return max((event["step"] for event in _events(folder) if event["event"] == "step"), default=0)


def started_at(folder: Path) -> int:
    """The step that the last part of a run has started from."""
    return [event["step"] for event in _events(folder) if event["event"] == "start"][-1]
