"""A long run's memory and speed, compared with its beginning: `python -m benchmarks.faults.soak [--minutes=60]
[--steps=100000] [--no_pressure]`.

One training run of a tiny model with evaluation, saves, cleanings and samples of a process beside it that takes and
gives back memory. Its anonymous memory, threads, open files and the files in its folders are sampled; what counts is
that the last quarter is as the second one. Processor time of a step, not time of the clock, and of the thread that
steps alone: those beside it watch memory and give signs of life so many times a second, so that on a busy machine they
take more of a step, 7% of it where it gets a twentieth of a core. And since other programs slow a processor down by a
third, in units of a yardstick: a fixed piece of work that is timed beside the run in every window of a few seconds. The
middle of the windows of a quarter counts, and how far it can be told.
`--steps` instead of `--minutes` runs so many steps, and tells the same figures. They go into docs/reliability.md.
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
from common.units import MIB
from memory.processes import usage_of
from training.report.run_files import METRICS_FILE, EventReader

PAGE = ROOT / "docs" / "reliability.md"
WINDOW_SECONDS = 5.0
FULL_MINUTES, LEAST_MINUTES, FULL_STEPS = 60, 20, 100_000  # shorter ones write no figures
MOST_SLOWER, ERRORS = 0.02, 2  # as a share, told apart from nothing by so many standard errors
MOST_GROWTH = 2 * MIB
KEPT = 2
HELD = {"threads": "threads", "open_files": "open files", "files": "files in its folders"}
WORK = (
    "--mixed_precision=no",
    "--eval_rows=16",
    "--sample_rows=1",
    "--log_steps=100",
    f"--keep_latest_n_ckp={KEPT}",
    "--num_threads=1",
    "--run_name=soak",
)
HOUR = (*SHAPE, "--max_seq_len=32", "--effective_batch_size=2", "--save_steps=200", "--eval_steps=500")
MANY = (
    "--d_model=16",
    "--d_kv=8",
    "--d_ff=16",
    "--num_heads=2",
    "--num_layers=1",
    "--num_decoder_layers=1",
    "--vocab_size=512",
    "--max_seq_len=16",
    "--effective_batch_size=1",
    "--save_steps=2000",
    "--eval_steps=5000",
)
PRESSURE = """
import time
while True:
    held = [bytearray(b"x") * (32 << 20) for _ in range(8)]
    time.sleep(0.2)
    del held
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
    yardstick_seconds: float = 1.0


def yardstick() -> float:
    """Processor seconds of a fixed piece of work, of the interpreter and of small products as a small step is."""
    began = time.process_time()
    matrix: Any = np.ones((64, 64), np.float32)
    for number in range(6000):
        matrix = matrix @ matrix / 64 if number % 4 == 0 else matrix
        str(number).encode()
    return time.process_time() - began


@contextmanager
def pressure(is_wanted: bool) -> Iterator[None]:
    """Another process that takes a quarter of a GiB and gives it back, again and again."""
    child = subprocess.Popen([sys.executable, "-c", PRESSURE]) if is_wanted else None
    try:
        yield
    finally:
        if child is not None:
            child.kill()
            child.wait()


def watch(folder: Path, steps: int, minutes: float) -> tuple[list[Sample], int]:
    """Run the training and sample it; where it is to last so many minutes, it is asked to stop then.

    Returns:
        the samples, and its exit code.
    """
    text = folder / "text.txt"
    text.write_text(
        "".join(" ".join(WORDS[i * j % len(WORDS)] for j in range(12)) + "\n" for i in range(2000)), encoding="utf8"
    )
    places = [
        f"--{name}={folder / place}"
        for name, place in (("output_dir", "runs"), ("log_dir", "logs"), ("cache_dir", "cache"))
    ]
    words = ["train", f"--train_file={text}", *WORK, *places, f"--max_steps={steps}"]
    words += HOUR if minutes else MANY
    with (folder / "screen").open("wb") as screen:
        run = subprocess.Popen([sys.executable, "train_low_mem.py", *words], cwd=ROOT, stdout=screen, stderr=screen)
    began, samples, steps_done = time.monotonic(), [], 0
    process, reader = psutil.Process(run.pid), EventReader(folder / "logs" / "soak" / METRICS_FILE)
    while run.poll() is None:
        time.sleep(WINDOW_SECONDS)
        with suppress(OSError):  # it has not begun to write
            steps_done = max([steps_done, *(event["step"] for event in reader.events() if event["event"] == "step")])
        try:
            found = _look(process, steps_done, folder)
        except (psutil.Error, OSError):
            break
        samples += [found] if found is not None else []
        if minutes and time.monotonic() - began > 60 * minutes:
            run.terminate()
            break
    return samples, run.wait()


def _look(process: psutil.Process, steps: int, folder: Path) -> Sample | None:
    seconds, usage = stepping_seconds(process.pid), usage_of([process.pid])
    if not usage.anon_bytes or not steps:  # It has ended, or has not begun.
        return None
    files = sum(len(names) for base, _, names in os.walk(folder) if "checkpoints" not in base)
    return Sample(
        steps,
        seconds,
        usage.anon_bytes,
        process.num_threads(),
        process.num_fds(),
        files,
        yardstick(),
    )


def stepping_seconds(pid: int, system: Path = Path("/proc")) -> float:
    """Processor time of a process' first thread, in which a run makes its steps, as the kernel counts it to the
    nanosecond.
    """
    return int((system / f"{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def left_behind(run_dir: Path) -> list[str]:
    """Names in a run's folder that should be gone, and checkpoints beyond those that are kept and the best."""
    hidden = [path.name for path in run_dir.rglob(".*")]
    checkpoints = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    return [*hidden, *checkpoints[: -KEPT - 1]]


@dataclass(frozen=True)
class Quarter:
    """A quarter of the steps: the most memory, what is usually held of all else, and the processor time of a step."""

    steps: int
    anon_bytes: int
    threads: int
    open_files: int
    files: int
    step_seconds: float
    step_yardsticks: float
    yardsticks_error: float


def quarters_of(samples: list[Sample]) -> list[Quarter]:
    """Four parts of as many steps each."""
    first, last = samples[0].steps, samples[-1].steps
    edges = [first + (last - first) * number / 4 for number in range(5)]
    parts = [[sample for sample in samples if low <= sample.steps <= high] for low, high in pairwise(edges)]
    return [_quarter(part) for part in parts]


def _quarter(part: list[Sample]) -> Quarter:
    pairs = [(a, b) for a, b in pairwise(part) if b.steps > a.steps]
    costs = [(b.cpu_seconds - a.cpu_seconds) / (b.steps - a.steps) for a, b in pairs]
    yardsticks = [(a.yardstick_seconds + b.yardstick_seconds) / 2 for a, b in pairs]
    relative = [cost / yard for cost, yard in zip(costs, yardsticks, strict=True)]
    low, middle, high = statistics.quantiles(relative, n=4)
    error = 1.253 * (high - low) / 1.349 / len(relative) ** 0.5  # of a median
    # a save opens files for a moment, and some samples fall into one: what is left open is there at all times
    usual = {name: int(statistics.median(getattr(sample, name) for sample in part)) for name in HELD}
    return Quarter(
        steps=part[-1].steps,
        anon_bytes=max(sample.anon_bytes for sample in part),
        step_seconds=statistics.median(costs),
        step_yardsticks=middle,
        yardsticks_error=error,
        **usual,
    )


def problems_of(quarters: list[Quarter]) -> list[str]:
    """What has grown from the second quarter to the last."""
    second, last = quarters[1], quarters[3]
    found = []
    slower, error = growth_of(quarters)
    if slower - ERRORS * error > MOST_SLOWER:
        found.append(f"a step takes {slower:+.1%} (± {ERRORS * error:.1%}) processor time")
    if last.anon_bytes > second.anon_bytes + MOST_GROWTH:
        found.append(f"memory has grown by {(last.anon_bytes - second.anon_bytes) / MIB:.1f} MiB")
    for name, word in HELD.items():
        if getattr(last, name) > getattr(second, name):
            found.append(f"{word}: {getattr(second, name)}, then {getattr(last, name)}")
    return found


def growth_of(quarters: list[Quarter]) -> tuple[float, float]:
    """By which share a step of the last quarter takes longer than one of the second; and the standard error of that."""
    second, last = quarters[1], quarters[3]
    growth = last.step_yardsticks / second.step_yardsticks
    errors = (quarter.yardsticks_error / quarter.step_yardsticks for quarter in (second, last))
    return growth - 1, growth * sum(error**2 for error in errors) ** 0.5


def body(quarters: list[Quarter], found: list[str], samples: int) -> str:
    """The table and the verdict."""
    header = [
        "quarter",
        "to step",
        "peak memory",
        "threads",
        "open files",
        "files",
        "processor time of a step",
        "in units of fixed work",
    ]
    rows = [
        [
            str(number),
            f"{q.steps:,}",
            f"{q.anon_bytes / MIB:.1f} MiB",
            str(q.threads),
            str(q.open_files),
            str(q.files),
            f"{q.step_seconds * 1000:.2f} ms",
            f"{q.step_yardsticks:.3f} ± {q.yardsticks_error:.3f}",
        ]
        for number, q in enumerate(quarters, 1)
    ]
    slower, error = growth_of(quarters)
    verdict = (
        "; ".join(found)
        or f"Flat: a step of the last quarter takes {slower:+.1%} (± {ERRORS * error:.1%}) processor time, relative to the second."
    )
    return f"{markdown(header, rows)}\n\n{verdict} {samples} windows of {WINDOW_SECONDS:.0f} s."


def main(arguments: list[str]) -> int:
    """Run, compare, write; ends with 1 where something grows."""
    _, options = options_of(arguments, {"minutes": "", "steps": "", "no_pressure": "False"}, __doc__ or "")
    by_steps = bool(options["steps"])
    minutes = 0.0 if by_steps else float(options["minutes"] or FULL_MINUTES)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        with pressure(options["no_pressure"] == "False"):
            samples, code = watch(folder, int(options["steps"] or 10**8), minutes)
        if code not in ((0,) if by_steps else (130,)) or len(samples) < 24:
            print((folder / "screen").read_text(encoding="utf8")[-2000:])
            print(f"ended with {code} after {len(samples)} windows: too short to tell")
            return 1
        left = left_behind(folder / "runs" / "soak")
    finally:
        shutil.rmtree(folder)
    quarters = quarters_of(samples)
    found = [*problems_of(quarters), *(f"left behind: {name}" for name in left)]
    text = body(quarters, found, len(samples))
    print(text)
    steps = samples[-1].steps
    if minutes >= LEAST_MINUTES or (by_steps and steps >= FULL_STEPS * 0.99):
        name, heading = (
            ("steps", f"{steps:,} small steps") if by_steps else ("soak", f"{minutes:.0f} minutes of training")
        )
        figures = {
            "quarters": [asdict(quarter) for quarter in quarters],
            "problems": found,
            "samples": [list(asdict(sample).values()) for sample in samples],
        }
        write_part(PAGE, name, heading, text, figures)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
