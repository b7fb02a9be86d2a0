"""One of two processes dies, or the machine with both: runs started by torchrun, as users start them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from benchmarks.faults.disk_faults import VARIABLE, Fault
from benchmarks.faults.kill_cases import STEPS, Case, Moment, Verdict, Words, World, contents, steps_done
from benchmarks.page import ROOT

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
INJECTED = ROOT / "benchmarks" / "injected"
POLL_SECONDS = 0.005


@dataclass
class PairCase(Case):
    """A run of two processes; given again, it is started by torchrun again."""

    changes: int = field(default=0)

    def launch(self, folder: Path, fault: Fault | None = None, words: Words | None = None) -> subprocess.Popen[bytes]:
        """Start both processes in a session of their own."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{INJECTED}{os.pathsep}{ROOT}"}
        environment |= {VARIABLE: fault.text()} if fault else {}
        command = [sys.executable, *LAUNCHER, str(ROOT / "train_low_mem.py"), *(words or self.words(folder))]
        with folder.with_suffix(".screen").open("wb") as screen:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=screen, stderr=subprocess.STDOUT, start_new_session=True
            )

    def to_end(self, folder: Path, words: Words) -> tuple[int, str]:
        """Run the command undisturbed; its exit code and its screen."""
        assert words[0] == "train"
        return self.launch(folder, words=words).wait(), folder.with_suffix(".screen").read_text(encoding="utf8")


class Pairs:
    """Kills of runs of two processes."""

    def __init__(self, world: World) -> None:
        def words(folder: Path) -> Words:
            return world.train(folder, "--dropout_rate=0.1")

        self.case = PairCase("pairs", world, words, {})
        self.folder = world.folder
        log = self.folder / "pairs.trace"
        whole = self.folder / "pairs-whole"
        whole.mkdir()
        code = self.case.launch(whole, Fault("trace", log=str(log), below="", rank="0")).wait()
        assert code == 0, whole.with_suffix(".screen").read_text()
        self.case.whole = contents(whole)
        self.case.changes = len(log.read_text().splitlines())

    def moments(self, times: int, draw: random.Random) -> Iterator[Moment]:
        """So many kills: the main process at a change of the disk, either one or both at a step."""
        for number in range(times):
            if number % 2:
                change = draw.randrange(self.case.changes)
                yield f"the main process before change {change}", partial(self._kill, partial(self._at_change, change))
            else:
                step, who = draw.randrange(1, STEPS), draw.choice(("one", "both"))
                worker = draw.randrange(2)
                yield f"{who} at step {step}", partial(self._kill, partial(self._at_step, step, who, worker))

    def _kill(self, at: Callable[[Path], None]) -> Verdict:
        folder = self.folder / "now"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        at(folder)
        verdict = self.case.judge(folder)
        shutil.rmtree(folder)
        return verdict

    def _at_change(self, number: int, folder: Path) -> None:
        code = self.case.launch(folder, Fault("kill", number, rank="0")).wait()
        assert code != 0, "the launcher tells of a process that was killed"

    def _at_step(self, step: int, who: str, worker: int, folder: Path) -> None:
        launched = self.case.launch(folder)
        while steps_done(folder) < step and launched.poll() is None:
            time.sleep(POLL_SECONDS)
        with suppress(psutil.Error):
            below = psutil.Process(launched.pid).children(recursive=True)
            workers = [process for process in below if "train_low_mem.py" in " ".join(process.cmdline())]
            for process in [workers[worker]] if who == "one" else [psutil.Process(launched.pid), *below]:
                process.send_signal(signal.SIGKILL)
        launched.wait()
