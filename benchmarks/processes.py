"""What do two processes take, and how fast are they? `python -m benchmarks.processes [--model=t5-small] [--rows=16] ...`.

    --model=t5-small  --rows=16  --tokens=128   the model, rows of one step, most tokens of source and of target
    --steps=4                                   steps after the one that warms up
    --processes=2                               processes on this machine, which share its cores

One process with all cores, then several with a share each: with whole weights, and with each a share of them
(`--shard_weights`). The command is `train`, started by torchrun. Speed is that of all processes together, from
metrics.jsonl; the peak is the anonymous memory of the largest process, as the kernel has marked it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.children import options_of
from benchmarks.contract import data_file, peak_of_process
from benchmarks.results import ROOT, markdown, write_section
from memory.units import format_size

OPTIONS = {"model": "t5-small", "rows": "16", "tokens": "128", "steps": "4", "processes": "2"}
POLL_SECONDS = 0.05


def measure(count: int, is_sharded: bool, options: dict[str, str]) -> dict[str, Any]:
    """Train with so many processes; ends the program where that fails."""
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "model_preset": options["model"], "tokenizer_type": "byte", "train_file": data_file("pairs"), "max_seq_len": options["tokens"],
            "max_target_len": options["tokens"], "effective_batch_size": options["rows"], "max_steps": 1 + int(options["steps"]),
            "eval_rows": 4, "sample_rows": 0, "num_threads": threads, "shard_weights": is_sharded, "probe": False,
            "cache_dir": f"{folder}/cache", "output_dir": f"{folder}/out", "log_dir": f"{folder}/logs", "run_name": "case",
        }  # fmt: skip
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
        words = ["train_low_mem.py", "train", *(f"--{name}={value}" for name, value in flags.items())]
        child = subprocess.Popen(
            [sys.executable, *launcher, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        peak = 0
        while child.poll() is None:
            peak = max(peak, *(peak_of_process(pid) for pid in _trainers(child.pid)), 0)
            time.sleep(POLL_SECONDS)
        if child.returncode:
            sys.exit(child.stderr.read()[-3000:] if child.stderr else f"exit code {child.returncode}")
        log = Path(folder) / "logs" / "case" / "metrics.jsonl"
        events = [json.loads(line) for line in log.read_text(encoding="utf8").splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    later = steps[1:]  # the first one warms up
    planned = next(event for event in events if event["event"] == "plan")
    return {
        "processes": count, "sharded": is_sharded, "peak_bytes": peak, "planned_bytes": planned["peak_bytes"],
        "tokens_per_second": sum(e["tokens"] for e in later) / sum(e["seconds"] for e in later),
        "losses": [event["loss"] for event in steps], "kept_blocks": planned["choice"]["kept_blocks"],
    }  # fmt: skip


def _trainers(pid: int) -> list[int]:
    """The processes that train: the child, or those below the launcher."""
    try:
        children = psutil.Process(pid).children(recursive=True)
        found = [child.pid for child in children if "train_low_mem.py" in child.cmdline()]
    except psutil.Error:
        return []
    return found or [pid]


def body(cases: list[dict[str, Any]]) -> str:
    """The table, and how far the losses lie apart."""
    one = cases[0]
    rows = [
        [
            f"{case['processes']}" + (", weights shared out" if case["sharded"] else ""),
            f"{case['tokens_per_second']:,.0f}", f"{case['tokens_per_second'] / one['tokens_per_second']:.2f}x",
            format_size(case["peak_bytes"]), format_size(case["planned_bytes"]),
            f"{max(abs(a / b - 1) for a, b in zip(case['losses'], one['losses'], strict=True)):.1e}",
        ]
        for case in cases
    ]  # fmt: skip
    head = [
        "processes",
        "tokens/s, all together",
        "to one",
        "peak of one process",
        "planned",
        "losses differ by at most",
    ]
    return markdown(head, rows)


def main(arguments: list[str]) -> None:
    """Measure and write the section."""
    _, options = options_of(arguments, OPTIONS, __doc__ or "")
    count = int(options["processes"])
    cases = []
    for ranks, is_sharded in ((1, False), (count, False), (count, True)):
        cases.append(measure(ranks, is_sharded, options))
        print(json.dumps(cases[-1]), flush=True)
    table = body(cases)
    print(table)
    heading = f"{count} processes on one machine: {options['model']}, {options['rows']} rows of at most {options['tokens']} + {options['tokens']} tokens"
    write_section("processes", heading, table, cases)


if __name__ == "__main__":
    main(sys.argv[1:])
