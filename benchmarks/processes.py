"""Memory and speed of two processes: `python -m benchmarks.processes [--model=t5-small] [--rows=16] ...`.

    --model=t5-small  --rows=16  --tokens=128   the model, rows of one step, most tokens of source and of target
    --steps=4                                   steps after the one that warms up
    --processes=2                               processes on this machine, which share its cores

One process with all cores, then several with a share each. The command is `train`, started by torchrun. Speed is that
of all processes together, from metrics.jsonl; the peak is the anonymous memory of the largest process, as the kernel
has marked it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.contract import data_file
from benchmarks.page import markdown, show_section
from benchmarks.parts import watched
from benchmarks.parts.children import options_of
from devices.cores import usable_cores
from support.units import format_size

OPTIONS = {"model": "t5-small", "rows": "16", "tokens": "128", "steps": "4", "processes": "2"}


def measure(count: int, options: dict[str, str]) -> dict[str, Any]:
    """Train with so many processes; ends the program where that fails."""
    flags = {
        "model_preset": options["model"],
        "train_file": data_file("pairs"),
        "max_seq_len": options["tokens"],
        "max_target_len": options["tokens"],
        "effective_batch_size": options["rows"],
        "max_steps": 1 + int(options["steps"]),
        "eval_rows": 4,
        "sample_rows": 0,
        "num_threads": max(1, usable_cores() // count),
        "probe": False,
    }
    run = watched.train(flags, processes=count)
    if run.returncode:
        sys.exit(run.messages[-3000:])
    return {
        "processes": count,
        "peak_bytes": run.peak_bytes,
        "planned_bytes": run.plan["peak_bytes"],
        "tokens_per_second": run.tokens_per_second,
        "losses": [event["loss"] for event in run.steps],
        "saved_blocks": run.plan["choice"]["saved_blocks"],
    }


def body(cases: list[dict[str, Any]]) -> str:
    """The table, and how far the losses lie apart."""
    one = cases[0]
    rows = [
        [
            f"{case['processes']}",
            f"{case['tokens_per_second']:,.0f}",
            f"{case['tokens_per_second'] / one['tokens_per_second']:.2f}x",
            format_size(case["peak_bytes"]),
            format_size(case["planned_bytes"]),
            f"{max(abs(a / b - 1) for a, b in zip(case['losses'], one['losses'], strict=True)):.1e}",
        ]
        for case in cases
    ]
    head = "processes", "tokens/s in total", "to one", "peak of one process", "planned", "largest difference of losses"
    return markdown(list(head), rows)


def main(arguments: list[str]) -> None:
    """Measure and write the section."""
    _, options = options_of(arguments, OPTIONS, __doc__ or "")
    count = int(options["processes"])
    cases = []
    for ranks in (1, count):
        cases.append(measure(ranks, options))
        print(json.dumps(cases[-1]), flush=True)
    heading = (
        f"{count} processes on one machine: {options['model']}, {options['rows']} rows of at most "
        f"{options['tokens']} + {options['tokens']} tokens"
    )
    show_section("processes", heading, body(cases), cases)


if __name__ == "__main__":
    main(sys.argv[1:])
