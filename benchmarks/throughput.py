"""Is a step faster and smaller than the peer's? `make bench`, or `python -m benchmarks.throughput [WORK ...]`.

Each system runs in a child process of its own, alone, in turn, `--repeats=N` times over. Printed and written to
docs/benchmarks.md: tokens/s, the peak of the process (anonymous memory of the tree, sampled every 50 ms; VmHWM beside it),
and the ratios to the peer with their spread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.results import ROOT, markdown, write_section
from memory.processes import ProcessTree
from memory.units import format_size

SYSTEMS = ("shipped", "tuned", "ours-standard", "ours-low", "ours-ultra")


@dataclass(frozen=True)
class Work:
    """Rows of source and target tokens through one model; steps timed after one to warm up."""

    model: str
    rows: int
    source: int
    target: int
    steps: int = 2


WORKS = {
    "chatlm-0.2b": Work("chatlm-0.2b", 16, 256, 256, 1),
    "t5-small": Work("t5-small", 8, 512, 114, 3),
    "t5-base": Work("t5-base", 8, 512, 114),
    "tiny": Work("tiny", 8, 256, 64, 3),
}


def measure(system: str, work: Work) -> dict[str, Any]:
    """Run one system on one work in a child process."""
    words = [system, work.model, work.rows, work.source, work.target, work.steps]
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.one_system", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    tree, peak = ProcessTree(child.pid), 0
    while child.poll() is None:
        peak = max(peak, tree.usage().anon_bytes)
        time.sleep(0.05)
    out, errors = child.communicate()
    if child.returncode:
        return {"system": system, "failed": errors.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]}
    figures = json.loads(out.strip().splitlines()[-1])
    tokens = work.rows * (work.source + work.target)
    return {**figures, "peak_bytes": peak, "tokens_per_second": tokens / min(figures["seconds"])}


def table(work: Work, runs: list[dict[str, Any]]) -> str:
    """The runs of one work as a Markdown table: the best of the repeats, and the spread of the ratio to the peer."""
    rows = []
    for system in SYSTEMS:
        good = [run for run in runs if run["system"] == system and "failed" not in run]
        if not good:
            continue
        speed, peak = max(run["tokens_per_second"] for run in good), max(run["peak_bytes"] for run in good)
        row = [system, f"{speed:,.0f}", format_size(peak), format_size(max(run["high_water_bytes"] for run in good))]
        for other in ("shipped", "tuned"):
            pairs = [
                (run, base)
                for run in good
                for base in runs
                if base["system"] == other and base.get("turn") == run.get("turn") and "failed" not in base
            ]
            ratios = sorted(run["tokens_per_second"] / base["tokens_per_second"] for run, base in pairs)
            sizes = [run["peak_bytes"] / base["peak_bytes"] for run, base in pairs]
            row.append(f"{ratios[0]:.2f}-{ratios[-1]:.2f}x at {max(sizes):.2f} of its peak" if ratios else "-")
        rows.append(row)
    return markdown(
        ["system", "tokens/s", "peak (anonymous)", "VmHWM", "to the peer as shipped", "to the peer tuned"], rows
    )


def main(arguments: list[str]) -> None:
    """Measure the named works; all flags are --name=value."""
    options = dict(word[2:].split("=", 1) for word in arguments if word.startswith("--"))
    names = [word for word in arguments if not word.startswith("--")] or ["chatlm-0.2b"]
    systems = options.get("systems", "shipped,ours-standard,ours-ultra").split(",")
    for name in names:
        work, runs = WORKS[name], []
        for turn in range(int(options.get("repeats", "2"))):
            for system in systems:
                run = {**measure(system, work), "turn": turn}
                runs.append(run)
                print(json.dumps(run), flush=True)
        body = table(work, runs)
        heading = f"{name}: {work.rows} rows of {work.source} + {work.target} tokens, one step"
        print(f"\n{heading}\n{body}", flush=True)
        write_section(f"throughput-{name}", heading, body, runs)


if __name__ == "__main__":
    main(sys.argv[1:])
