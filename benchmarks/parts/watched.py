"""A training run, watched: its largest process from outside, its own log, and its model.

Peak: the most anonymous memory of one process, by the kernel's own mark, which no short peak escapes.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from safetensors import safe_open

from benchmarks.page import ROOT
from benchmarks.parts.children import peak_of_process, words_of
from benchmarks.parts.hard_limit import HardLimit
from benchmarks.parts.rows import read_rows

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class WatchedRun:
    """How a run ended, what it wrote to stderr, the most that one of its processes held, and what its log tells."""

    returncode: int
    messages: str
    peak_bytes: int
    events: list[dict[str, Any]]

    @property
    def plan(self) -> dict[str, Any]:
        """The first plan; empty where the run did not come so far."""
        return first_event(self.events, "plan")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What was logged of every step."""
        return [event for event in self.events if event["event"] == "step"]

    @property
    def tokens_per_second(self) -> float:
        """Over all steps but the first, which warms up; 0 where there is no other."""
        later = self.steps[1:]
        return sum(e["tokens"] for e in later) / sum(e["seconds"] for e in later) if later else 0.0


def train(flags: Mapping[str, Any], processes: int = 1, limit: HardLimit | None = None) -> WatchedRun:
    """Train a model that reads bytes and starts anew, in folders that are gone afterwards.

    Args:
        flags: of `train`, before the defaults made here; `num_threads` counts for each process.
        processes: on this machine, started by torchrun if there are several.
        limit: that the child enters before it starts.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", encoding="utf8") as errors:
        given = {
            "tokenizer_type": "byte",
            "num_threads": 1,
            "cache_dir": f"{folder}/cache",
            "output_dir": f"{folder}/out",
            "log_dir": f"{folder}/logs",
            "run_name": "case",
            **flags,
        }
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = ["train_low_mem.py", "train", *words_of(given)]
        child = subprocess.Popen(
            [sys.executable, *(launcher if processes > 1 else ()), *command],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": str(given["num_threads"])},
            preexec_fn=limit.enter if limit else None,
        )
        peak = 0
        while child.poll() is None:
            peak = max(peak, *(peak_of_process(pid) for pid in _trainers(child.pid, processes)), 0)
            time.sleep(POLL_SECONDS)
        errors.seek(0)
        log = Path(folder) / "logs" / "case" / "metrics.jsonl"
        return WatchedRun(child.returncode, errors.read(), peak, read_rows(log) if log.is_file() else [])


def first_event(events: Iterable[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The first event of a kind; empty without one."""
    return next((event for event in events if event["event"] == kind), {})


def last_event(events: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The last event of a kind; empty without one."""
    return first_event(reversed(events), kind)


def count_weights(model: Path) -> int:
    """Weights in a model's folder."""
    with safe_open(model / "model.safetensors", "np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def _trainers(pid: int, processes: int) -> list[int]:
    """The processes that train: the child, or those below the launcher."""
    if processes == 1:
        return [pid]
    try:
        below = psutil.Process(pid).children(recursive=True)
        return [child.pid for child in below if "train_low_mem.py" in child.cmdline()]
    except psutil.Error:
        return []
