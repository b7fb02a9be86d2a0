"""Default threads beside other programs: `python -m benchmarks.busy [--times=5] [--minutes=40]`.

Steps of two models, on a quiet machine and beside endless loops, one for each core, with the default threads, with
--num_threads=1 and with a thread for each core. Told are the medians of a step's seconds, and the default over both others. The
first steps of a run are left out. What has not been measured after --minutes is left out and said.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.parts.children import options_of
from benchmarks.parts.results import ROOT, markdown, show_section
from devices.cores import usable_cores

OPTIONS = {"times": "5", "minutes": "40", "write": "True"}
LOOP = "while True: pass"
LEFT_OUT = 3  # steps, with which libraries are loaded
RUN_SECONDS = 300
SHAPE = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
WORK: dict[str, dict[str, Any]] = {
    "short rows": {
        **SHAPE, "tokenizer_type": "byte", "max_seq_len": 64, "max_steps": 150, "effective_batch_size": 16,
    },
    "t5-small": {
        "model_preset": "t5-small", "tokenizer_type": "byte", "max_seq_len": 128, "max_steps": 12,
        "effective_batch_size": 8,
    },
}  # fmt: skip
THREADS: dict[str, dict[str, Any]] = {
    "one thread": {"num_threads": 1},
    "all cores": {"num_threads": usable_cores()},
    "default": {},
}


@contextmanager
def endless_loops(count: int) -> Iterator[None]:
    """Other programs that work all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds_a_step(folder: Path, flags: dict[str, Any]) -> float | None:
    """The mean of a run's steps behind the first ones; None: it took longer than RUN_SECONDS."""
    fixed = {
        "train_file": folder / "text.txt", "output_dir": folder / "runs", "log_dir": folder / "logs", "run_name": "busy",
        "cache_dir": folder / "cache", "overwrite": True, "sample_rows": 0, "eval_rows": 4, "save_steps": 1000,
        "eval_steps": 1000, "memory_budget": "4G", "probe": False, "log_steps": 1,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in {**fixed, **flags}.items()]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, str(ROOT / "train_low_mem.py"), "train", *words]
    try:
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=RUN_SECONDS, check=True)
    except subprocess.TimeoutExpired:
        return None
    lines = (folder / "logs" / "busy" / "metrics.jsonl").read_text("utf8").splitlines()
    steps = [event["seconds"] for event in map(json.loads, lines) if event["event"] == "step"]
    return statistics.fmean(steps[LEFT_OUT:])


def measure(times: int, minutes: float) -> list[dict[str, Any]]:
    """A row for each work, quiet and beside loops: thread setting -> seconds a step of every run."""
    end = time.monotonic() + 60 * minutes
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [path.read_text("utf8") for path in sorted((ROOT / "docs").glob("*.md"))]
        (folder / "text.txt").write_text("\n".join(texts), "utf8")
        for work, loops in product(WORK, (0, usable_cores())):
            seconds: dict[str, list[float]] = {threads: [] for threads in THREADS}
            with endless_loops(loops):
                # In turns, so that what changes on the machine meets all.
                for _ in range(times):
                    for threads, setting in THREADS.items():
                        if time.monotonic() < end:
                            measured = seconds_a_step(folder, {**WORK[work], **setting})
                            seconds[threads].append(RUN_SECONDS if measured is None else measured)
            rows.append({"work": work, "loops": loops, "seconds": seconds})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def body(rows: list[dict[str, Any]]) -> str:
    """The table: medians, and the default over both others; what was not measured in time is left out."""
    cells = []
    for row in rows:
        medians = {threads: statistics.median(each) for threads, each in row["seconds"].items() if each}
        if len(medians) == len(THREADS):
            ratios = [f"{medians['default'] / medians[other]:.2f}" for other in ("one thread", "all cores")]
            times = [f"{1000 * medians[threads]:.1f} ms" for threads in THREADS]
            cells.append([row["work"], str(row["loops"]), *times, *ratios])
    head = ["work", "endless loops beside", *THREADS, "default / one thread", "default / all cores"]
    return markdown(head, cells)


def main(words: list[str]) -> None:
    """Measure and write the section."""
    _, options = options_of(words, OPTIONS, __doc__ or "")
    rows = measure(int(options["times"]), float(options["minutes"]))
    show_section("busy", "Steps beside other programs", body(rows), rows, options["write"] == "True")


if __name__ == "__main__":
    main(sys.argv[1:])
