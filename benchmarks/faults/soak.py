"""A long run's memory and speed, compared with its beginning: `python -m benchmarks.faults.soak [--minutes=60]`.

One training run of a tiny model with evaluation, saves, cleanings and samples, beside a process that takes memory and
gives it back. Its anonymous memory, threads, open files and the files in its folders are sampled, and the last quarter
has to be as the second one. Speed is the processor time of the thread that steps, in units of a fixed piece of work
that is timed beside the run in every window of a few seconds, since other programs slow a processor down by a third.
A run of 20 minutes or more goes into docs/reliability.md.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.faults.kill_cases import SHAPE, WORDS
from benchmarks.page import ROOT, markdown, write_part
from benchmarks.parts.children import options_of
from memory.processes import usage_of
from support.units import MIB
from training.report.run_files import METRICS_FILE, EventReader

PAGE = ROOT / "docs" / "reliability.md"
WINDOW_SECONDS = 5.0
FULL_MINUTES = 60
LEAST_MINUTES = 20  # A shorter run writes no figures.
LEAST_WINDOWS = 24
MOST_SLOWER = 0.02  # As a share, and beyond two standard errors.
MOST_GROWTH = 2 * MIB
KEPT_CHECKPOINTS = 2
COUNTED = {"threads": "threads", "open_files": "open files", "files": "files in its folders"}
INTERRUPTED = 130
FLAGS = (
    *SHAPE,
    "--max_seq_len=32",
    "--effective_batch_size=2",
    "--save_steps=200",
    "--eval_steps=500",
    "--max_steps=100000000",
    "--mixed_precision=no",
    "--eval_rows=16",
    "--sample_rows=1",
    "--log_steps=100",
    f"--keep_latest_n_ckp={KEPT_CHECKPOINTS}",
    "--num_threads=1",
    "--run_name=soak",
)
PRESSURE = """
import time
while True:
    blocks = [bytearray(b"x") * (32 << 20) for _ in range(8)]
    time.sleep(0.2)
    del blocks
    time.sleep(0.2)
"""


@dataclass(frozen=True)
class Sample:
    """A look at the run."""

    steps: int
    cpu_seconds: float
    anon_bytes: int
    threads: int
    open_files: int
    files: int
    yardstick_seconds: float


@dataclass(frozen=True)
class Quarter:
    """A quarter of the steps: the most memory, the usual count of all else, and the processor time of a step."""

    steps: int
    anon_bytes: int
    threads: int
    open_files: int
    files: int
    step_seconds: float
    step_yardsticks: float
    yardsticks_error: float


@contextmanager
def pressure() -> Iterator[None]:
    """Another process that takes a quarter of a GiB and gives it back, again and again."""
    child = subprocess.Popen([sys.executable, "-c", PRESSURE])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def watch(folder: Path, minutes: float) -> tuple[list[Sample], int]:
    """Run the training, sample it, and ask it to stop after so many minutes; the samples, and its exit code."""
    text = folder / "text.txt"
    lines = (" ".join(WORDS[i * j % len(WORDS)] for j in range(12)) for i in range(2000))
    text.write_text("\n".join(lines) + "\n", encoding="utf8")
    folders = [f"--output_dir={folder / 'runs'}", f"--log_dir={folder / 'logs'}", f"--cache_dir={folder / 'cache'}"]
    command = [sys.executable, "train_low_mem.py", "train", f"--train_file={text}", *FLAGS, *folders]
    with (folder / "screen").open("wb") as screen:
        run = subprocess.Popen(command, cwd=ROOT, stdout=screen, stderr=screen)
    process = psutil.Process(run.pid)
    metrics = EventReader(folder / "logs" / "soak" / METRICS_FILE)
    end = time.monotonic() + 60 * minutes
    steps = 0
    samples = list[Sample]()
    while run.poll() is None and time.monotonic() < end:
        time.sleep(WINDOW_SECONDS)
        with suppress(OSError):  # There is no log yet.
            steps = max([steps, *(event["step"] for event in metrics.events() if event["event"] == "step")])
        with suppress(psutil.Error, OSError):  # It has ended.
            if steps:
                samples.append(_sample(process, steps, folder))
    run.terminate()
    return samples, run.wait()


def _sample(process: psutil.Process, steps: int, folder: Path) -> Sample:
    return Sample(
        steps=steps,
        cpu_seconds=stepping_seconds(process.pid),
        anon_bytes=usage_of([process.pid]).anon_bytes,
        threads=process.num_threads(),
        open_files=process.num_fds(),
        files=sum(len(names) for base, _, names in os.walk(folder) if "checkpoints" not in base),
        yardstick_seconds=yardstick(),
    )


def stepping_seconds(pid: int) -> float:
    """Processor time of a process' first thread, which makes the steps, as the kernel counts it to the nanosecond."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def yardstick() -> float:
    """Processor seconds of a fixed piece of work, of the interpreter and of small products as a small step is."""
    began = time.process_time()
    matrix: Any = np.ones((64, 64), np.float32)
    for number in range(6000):
        if number % 4 == 0:
            matrix = matrix @ matrix / 64
        str(number).encode()
    return time.process_time() - began


def quarters_of(samples: list[Sample]) -> list[Quarter]:
    """Four parts of as many steps each."""
    first, last = samples[0].steps, samples[-1].steps
    edges = [first + (last - first) * number / 4 for number in range(5)]
    return [_quarter([sample for sample in samples if low <= sample.steps <= high]) for low, high in pairwise(edges)]


def _quarter(part: list[Sample]) -> Quarter:
    seconds = list[float]()
    relative = list[float]()
    for a, b in pairwise(part):
        if b.steps > a.steps:
            seconds.append((b.cpu_seconds - a.cpu_seconds) / (b.steps - a.steps))
            relative.append(seconds[-1] / ((a.yardstick_seconds + b.yardstick_seconds) / 2))
    low, middle, high = statistics.quantiles(relative, n=4)
    # A save opens files for a moment, and some samples fall into one: what is left open is there at all times.
    usual = {name: int(statistics.median(getattr(sample, name) for sample in part)) for name in COUNTED}
    return Quarter(
        steps=part[-1].steps,
        anon_bytes=max(sample.anon_bytes for sample in part),
        step_seconds=statistics.median(seconds),
        step_yardsticks=middle,
        yardsticks_error=1.253 * (high - low) / 1.349 / len(relative) ** 0.5,  # The standard error of a median.
        **usual,
    )


def growth_of(quarters: list[Quarter]) -> tuple[float, float]:
    """By which share a step of the last quarter takes longer than one of the second; two standard errors of that."""
    second, last = quarters[1], quarters[3]
    growth = last.step_yardsticks / second.step_yardsticks
    errors = (quarter.yardsticks_error / quarter.step_yardsticks for quarter in (second, last))
    return growth - 1, 2 * growth * sum(error**2 for error in errors) ** 0.5


def problems_of(quarters: list[Quarter], run_dir: Path) -> list[str]:
    """What has grown from the second quarter to the last, and files that should be gone."""
    second, last = quarters[1], quarters[3]
    problems = list[str]()
    slower, error = growth_of(quarters)
    if slower - error > MOST_SLOWER:
        problems.append(f"a step takes {slower:+.1%} (± {error:.1%}) processor time")
    if last.anon_bytes > second.anon_bytes + MOST_GROWTH:
        problems.append(f"memory has grown by {(last.anon_bytes - second.anon_bytes) / MIB:.1f} MiB")
    for name, word in COUNTED.items():
        if getattr(last, name) > getattr(second, name):
            problems.append(f"{word}: {getattr(second, name)}, then {getattr(last, name)}")
    checkpoints = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    hidden = [path.name for path in run_dir.rglob(".*")]
    # Beside the newest checkpoints the best one is kept.
    return problems + [f"left behind: {name}" for name in [*hidden, *checkpoints[: -KEPT_CHECKPOINTS - 1]]]


def body(quarters: list[Quarter], problems: list[str], samples: int) -> str:
    """The table and the verdict."""
    header = [
        "quarter",
        "to step",
        "peak memory",
        *COUNTED.values(),
        "processor time of a step",
        "in units of fixed work",
    ]
    rows = [
        [
            str(number),
            f"{quarter.steps:,}",
            f"{quarter.anon_bytes / MIB:.1f} MiB",
            *(str(getattr(quarter, name)) for name in COUNTED),
            f"{quarter.step_seconds * 1000:.2f} ms",
            f"{quarter.step_yardsticks:.3f} ± {quarter.yardsticks_error:.3f}",
        ]
        for number, quarter in enumerate(quarters, 1)
    ]
    slower, error = growth_of(quarters)
    flat = (
        f"Flat: a step of the last quarter takes {slower:+.1%} (± {error:.1%}) processor time, relative to the second."
    )
    verdict = "; ".join(problems) or flat
    return f"{markdown(header, rows)}\n\n{verdict} {samples} windows of {WINDOW_SECONDS:.0f} s."


def main(arguments: list[str]) -> int:
    """Run, compare, write; ends with 1 where something grows."""
    _, options = options_of(arguments, {"minutes": str(FULL_MINUTES)}, __doc__ or "")
    minutes = float(options["minutes"])
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        with pressure():
            samples, code = watch(folder, minutes)
        if code != INTERRUPTED or len(samples) < LEAST_WINDOWS:
            print((folder / "screen").read_text(encoding="utf8")[-2000:])
            print(f"ended with {code} after {len(samples)} windows: too short to tell")
            return 1
        quarters = quarters_of(samples)
        problems = problems_of(quarters, folder / "runs" / "soak")
    finally:
        shutil.rmtree(folder)
    text = body(quarters, problems, len(samples))
    print(text)
    if minutes >= LEAST_MINUTES:
        figures = {
            "quarters": [asdict(quarter) for quarter in quarters],
            "problems": problems,
            "samples": [list(asdict(sample).values()) for sample in samples],
        }
        write_part(PAGE, "soak", f"{minutes:.0f} minutes of training", text, figures)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
