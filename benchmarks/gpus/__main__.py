"""Steps on a GPU beside Hugging Face T5, in at most four minutes: `python -m benchmarks.gpus [WORK ...]`.

    WORK             small8 (t5-small, 8 rows), base32 (t5-base, 32 rows, dropout), akk128 (19M weights, 128 ragged
    rows),
                     baserag (t5-base, 64 ragged rows); by default all, in this order
    --systems=...    of ours-standard, ours-ultra, amp, ours-compiled, regional; by default all
    --seconds=240    for everything: each system has an equal share of what is left when it begins
    --steps=10       timed, behind three that warm up          --write=True     into docs/benchmarks.md
    --device=cuda    or another device, whose kernels and peaks are not counted

Each system runs in a child process of its own. Where it fails or takes longer than its share, the row says why, and the
works behind are tried again while there is time. Printed: a JSON line for each system and work, then the tables.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from benchmarks.gpus.works import COMPILE, HAS_COMPILE, MEASURED, PEERS, SYSTEMS, WORKS
from benchmarks.page import markdown, show_section
from benchmarks.parts import children
from benchmarks.throughput import Run, refuse_unknown
from devices.choose import backends
from support.units import format_size

OPTIONS = {"systems": "", "seconds": "240", "steps": "10", "write": "True", "device": "cuda"}
COLUMNS = ["system", "ms (best)", "GPU busy, ms", "kernels", "peak of tensors", "planned", "first step, s", "tokens/s"]
HEAD = [*COLUMNS, *(f"speed to {peer}" for peer in PEERS)]


def measure(system: str, names: Sequence[str], device: str, steps: int, seconds: float) -> list[Run]:
    """Run one system on several works within so many seconds; a work that fails is a run with its reason."""
    runs: list[Run] = []
    ends = time.monotonic() + seconds
    while len(runs) < len(names):
        rest = names[len(runs) :]
        words = ["-m", "benchmarks.gpus.one_system", system, device, str(steps), *rest]
        child = children.run(words, stop=lambda: time.monotonic() > ends)
        runs += [{"system": system, **json.loads(line)} for line in child.output.splitlines() if line.startswith("{")]
        is_late = time.monotonic() > ends
        for name in names[len(runs) :][: None if is_late else 1]:
            reason = f"not done in the {seconds:.0f} s of this system" if is_late else child.failure
            runs.append({"system": system, "work": name, "failed": reason})
    return runs


def table(runs: list[Run]) -> str:
    """The runs of one work as a Markdown table."""
    peers = {run["system"]: run["seconds"] for run in runs if run["system"] in PEERS and "failed" not in run}
    rows = []
    for run in runs:
        if "failed" in run:
            rows.append([run["system"], f"failed, because: {run['failed']}", *["-"] * (len(HEAD) - 2)])
            continue
        milliseconds = f"{1e3 * run['seconds']:.1f} ({1e3 * run['best_seconds']:.1f})"
        of_card = [f"{1e3 * run['gpu_seconds']:.1f}", f"{run['kernels']:,}", format_size(run["peak_bytes"])]
        planned = format_size(run["planned_bytes"]) if run["planned_bytes"] else "-"
        speeds = [f"{run['first_seconds']:.1f}", f"{run['tokens_per_second']:,.0f}"]
        ratios = [f"{peers[peer] / run['seconds']:.2f}x" if peer in peers else "-" for peer in PEERS]
        rows.append([run["system"], milliseconds, *of_card, planned, *speeds, *ratios])
    return markdown(HEAD, rows)


def main(arguments: list[str]) -> None:
    """Measure the named works; all flags are --name=value."""
    names, options = children.options_of(arguments, OPTIONS, str(__doc__))
    requested = [name for name in options["systems"].split(",") if name]
    refuse_unknown(names, list(WORKS), requested, SYSTEMS)
    if missing := backends()[options["device"]].why_missing():
        print(f"nothing can be measured with --device={options['device']}:", missing, file=sys.stderr)
        sys.exit(2)
    systems = [system for system in SYSTEMS if system in requested or not requested]
    if "ours-compiled" in systems and not HAS_COMPILE:
        print(f"ours-compiled is left out: this version has no setting {COMPILE}")
        systems.remove("ours-compiled")
    runs: list[Run] = []
    ends = time.monotonic() + float(options["seconds"])
    for number, system in enumerate(systems):
        share = (ends - time.monotonic()) / (len(systems) - number)
        for run in measure(system, names or MEASURED, options["device"], int(options["steps"]), share):
            runs.append(run)
            print(json.dumps(run), flush=True)
    tables = []
    for name in names or MEASURED:
        work = WORKS[name]
        dropped = f", dropout {work.dropout}" if work.dropout else ""
        title = f"**{name}**: {len(work.lengths)} rows, {sum(map(sum, work.lengths)):,} tokens{dropped}"
        tables.append(f"{title}\n\n{table([run for run in runs if run['work'] == name])}")
    card = next((run["card"] for run in runs if "failed" not in run), "")
    is_written = options["write"] == "True" and bool(card)
    show_section("gpus", "Steps on a GPU", "\n\n".join(tables), runs, card=card, is_written=is_written)


if __name__ == "__main__":
    main(sys.argv[1:])
