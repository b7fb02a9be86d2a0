"""Speed and memory of a step beside the peer: `make bench`, or `python -m benchmarks.throughput [WORK ...]`.

    WORK           tiny, t5-small (the default), t5-base, chatlm-0.2b, t5-3b
    --systems=...  of shipped, tuned, ours-standard, ours-low, ours-ultra; by default all that the work has room for
    --repeats=2    turns                              --write=True   into docs/benchmarks.md

Each system runs in a child process of its own, alone, in turn. Printed: tokens/s, the peak of the process (anonymous
memory of the tree; VmHWM, with pages of files, beside it), the ratios to the peer with their spread, and the share of
what this machine multiplies at best: three times the products of a forward a second, to the measured rate of products,
in the dtype that each system computes in. Recomputed products do not count. `tuned` takes bf16 only on processors with
units for it: without AMX or AVX512-BF16 it would take hours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.page import SummaryRow, markdown, show_section
from benchmarks.parts import children
from memory.estimate.time import Amount, flops_of, recomputed_flops
from settings.declared import T5ModelConfig
from settings.precedence import model_presets
from support.units import format_size

Run = dict[str, Any]  # One system in one turn.
SYSTEMS = ("shipped", "tuned", "ours-standard", "ours-low", "ours-ultra")
MODE_BAR = 0.95  # of the share of ours-standard's speed that a mode's recomputed products allow
OPTIONS = {"systems": "", "repeats": "2", "write": "True"}


def saved_blocks(mode: str, blocks: int) -> int:
    """How many of a model's blocks keep their activations for backward."""
    return {"standard": blocks, "low": blocks // 2, "ultra": 0}[mode]


@dataclass(frozen=True)
class Work:
    """Rows of source and target tokens through one model; steps timed after one to warm up.

    Args:
        systems: those that run by default. bar_bytes: most VmHWM of ours-ultra; 0: none.
    """

    model: str
    rows: int
    source: int
    target: int
    steps: int = 2
    systems: tuple[str, ...] = SYSTEMS
    bar_bytes: int = 0

    @property
    def shape(self) -> T5ModelConfig:
        """What the model is like."""
        return T5ModelConfig(**model_presets()[self.model])

    @property
    def flops(self) -> float:
        """Multiplications and additions of one step without recomputing: a forward, and twice that back."""
        return 3 * sum(flops_of(self.shape, Amount.of_rows(self.rows, self.source, self.target)))

    def allowed(self, system: str) -> float:
        """Share of the speed of ours-standard that is left where all else is as fast: the first blocks are
        recomputed.
        """
        layers, blocks = self.shape.num_layers, self.shape.num_layers + self.shape.num_decoder_layers
        recomputed = blocks - saved_blocks(system.removeprefix("ours-"), blocks)
        part = replace(self.shape, num_layers=min(layers, recomputed), num_decoder_layers=max(0, recomputed - layers))
        again = recomputed_flops(part, Amount.of_rows(self.rows, self.source, self.target))
        return self.flops / (self.flops + again)


WORKS = {
    "chatlm-0.2b": Work("chatlm-0.2b", 16, 256, 256, 1),
    "t5-small": Work("t5-small", 8, 512, 114, 3),
    "t5-base": Work("t5-base", 8, 512, 114, 2, SYSTEMS, int(1.05 * 2**30)),
    "t5-3b": Work("t5-3b", 1, 512, 114, 1, ("ours-ultra",), int(7.5 * 2**30)),  # the peer would take 45 GiB
    "tiny": Work("tiny", 8, 256, 64, 3),
}


def measure(system: str, work: Work) -> Run:
    """Run one system on one work in a child process."""
    words = [system, work.model, work.rows, work.source, work.target, work.steps]
    child = children.run(["-m", "benchmarks.parts.one_system", *map(str, words)])
    if child.failure:
        return {"system": system, "failed": child.failure}
    figures = child.figures
    tokens, seconds = work.rows * (work.source + work.target), min(figures["seconds"])
    share = work.flops / seconds / figures["product_rate"]
    found = {"peak_bytes": child.peak_bytes, "tokens_per_second": tokens / seconds, "share": share}
    return {**figures, **found, "system": system}


def table(runs: list[Run]) -> str:
    """The runs of one work as a Markdown table: the best of the repeats, and the spread of the ratio to the peer."""
    rows = []
    for system in SYSTEMS:
        mine = [run for run in runs if run["system"] == system]
        good = [run for run in mine if "failed" not in run]
        if not good:
            rows += [[system, "-", run["failed"], "-", "-", "-", "-"] for run in mine[:1]]
            continue
        fast, peak = max(good, key=lambda run: run["tokens_per_second"]), max(run["peak_bytes"] for run in good)
        rows.append(
            [
                system,
                f"{fast['tokens_per_second']:,.0f}",
                format_size(peak),
                format_size(max(run["high_water_bytes"] for run in good)),
                f"{100 * fast['share']:.0f}% of {fast['compute']}",
                *(ratio(good, [run for run in runs if run["system"] == peer]) for peer in ("shipped", "tuned")),
            ]
        )
    head = ["system", "tokens/s", "peak (anonymous)", "VmHWM", "share of peak products", "vs. the peer as shipped"]
    return markdown([*head, "vs. the peer tuned"], rows)


def notes(work: Work, runs: list[Run]) -> list[str]:
    """What a reader of the table must know: the rate of products, and whether the bar is kept."""
    good = [run for run in runs if "failed" not in run]
    said = []
    if good:
        rates = {name: max(run["rates"][name] for run in good) / 1e9 for name in ("fp32", "bf16")}
        said.append(f"Measured peak rates of products: fp32 {rates['fp32']:,.0f}, bf16 {rates['bf16']:,.1f} GFLOP/s.")
    if any(run["system"] == "tuned" for run in good):
        how = next(run for run in good if run["system"] == "tuned")["compute"]
        said[-1] += (
            f" The tuned peer computes in {how}, without dropout, with fused AdamW and torch.compile: compilation time "
            "is excluded; its processes count in the peak, not in VmHWM."
        )
    standard = [run for run in good if run["system"] == "ours-standard"]
    for mode in ("ours-low", "ours-ultra"):
        bar = MODE_BAR * work.allowed(mode)
        if shares := speeds_of(pairs_of([run for run in good if run["system"] == mode], standard)):
            holds = "met" if min(shares) >= bar else "partly met" if max(shares) >= bar else "**missed**"
            told = f"{shares[0]:.0%}" if shares[0] == shares[-1] else f"{shares[0]:.0%} to {shares[-1]:.0%}"
            said.append(
                f"Target {holds}: {mode} at {told} of the speed of ours-standard; its recomputed products allow "
                f"{work.allowed(mode):.0%}, and {bar:.0%} are required."
            )
    largest = max((run["high_water_bytes"] for run in good if run["system"] == "ours-ultra"), default=0)
    if work.bar_bytes and largest:
        holds = "met" if largest <= work.bar_bytes else "**missed**"
        said.append(f"Target {holds}: at most {format_size(work.bar_bytes)} of VmHWM; {format_size(largest)} measured.")
    return said


def pairs_of(runs: list[Run], others: list[Run]) -> list[tuple[Run, Run]]:
    """The runs of two systems that stood beside each other in one turn."""
    return [(run, other) for run in runs for other in others if other["turn"] == run["turn"] and "failed" not in other]


def speeds_of(pairs: list[tuple[Run, Run]]) -> list[float]:
    """Speed of the first over the second's, turn by turn, the least first."""
    return sorted(run["tokens_per_second"] / other["tokens_per_second"] for run, other in pairs)


def ratio(runs: list[Run], peers: list[Run]) -> str:
    """Speed and peak over the peer's, turn by turn."""
    pairs = pairs_of(runs, peers)
    if not pairs:
        return "-"
    speeds = speeds_of(pairs)
    peak = max(run["peak_bytes"] / peer["peak_bytes"] for run, peer in pairs)
    return f"{speeds[0]:.2f}-{speeds[-1]:.2f}x at {peak:.2f} of its peak"


def summary(name: str, runs: list[Run]) -> list[SummaryRow]:
    """The least peak and the highest speed of this project and of the peer."""
    good = [run for run in runs if "failed" not in run]
    sides = [[run for run in good if run["system"].startswith("ours-")]]
    sides.append(
        [run for run in good if run["system"] == "tuned"] or [run for run in good if run["system"] == "shipped"]
    )
    cells: dict[str, list[str]] = {"memory": [], "speed": []}
    for side in sides:
        least = min(side, key=lambda run: run["peak_bytes"], default=None)
        fastest = max(side, key=lambda run: run["tokens_per_second"], default=None)
        cells["memory"].append(f"{format_size(least['peak_bytes'])} ({least['system']})" if least else "-")
        cells["speed"].append(f"{fastest['tokens_per_second']:,.0f} tokens/s ({fastest['system']})" if fastest else "-")
    work = f"a step of {name}"
    return [(question, work, ours, peer) for question, (ours, peer) in cells.items()]


def main(arguments: list[str]) -> None:
    """Measure the named works; all flags are --name=value."""
    names, options = children.options_of(arguments, OPTIONS, str(__doc__))
    asked = [name for name in options["systems"].split(",") if name]
    refuse_unknown(names, list(WORKS), asked, SYSTEMS)
    for name in names or ["t5-small"]:
        work, runs = WORKS[name], []
        for turn in range(int(options["repeats"])):
            for system in asked or work.systems:
                runs.append({**measure(system, work), "turn": turn})
                print(json.dumps(runs[-1]), flush=True)
        body = "\n\n".join([table(runs), *notes(work, runs)])
        heading = f"{name}: {work.rows} rows of {work.source} + {work.target} tokens, one step"
        is_written = options["write"] == "True"
        show_section(f"throughput-{name}", heading, body, runs, summary(name, runs), is_written=is_written)


def refuse_unknown(names: Sequence[str], works: Sequence[str], systems: Sequence[str], known: Sequence[str]) -> None:
    """End the program where a work or a system is none."""
    if unknown := [*(name for name in names if name not in works), *(name for name in systems if name not in known)]:
        sys.exit(f"unknown: {', '.join(unknown)}; works are {', '.join(works)}; systems are {', '.join(known)}")


if __name__ == "__main__":
    main(sys.argv[1:])
