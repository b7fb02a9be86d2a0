"""Speed and memory of a GPU's step beside Hugging Face, each system in its own child process, in turn.

Memory is told three times: of tensors, which the plan predicts and the ratios compare; held by the caching allocator,
which a budget limits; and of the card, seen from outside. Tokens are those of rows, never padding.
"""

from __future__ import annotations

import json
import sys

from benchmarks.gpus.card import watched_card
from benchmarks.gpus.works import PEERS, SYSTEMS, described, fitting_rows, works
from benchmarks.parts import children
from benchmarks.parts.results import Run, markdown, pairs_of, ratio, show_section, speeds_of
from units import format_size

STEPS = 10
MEMORY_SHARE = 0.4  # of compiled Hugging Face's, at no less than its speed
HEAD = (
    "system", "tokens/s", "peak of tensors", "planned", "held by the allocator", "card, from outside", "process",
    "share of peak products", *(f"to {peer}" for peer in PEERS),
)  # fmt: skip


def compare(names: list[str], systems: list[str], repeats: int, device: str, write: bool) -> None:
    """Measure works on a GPU, print their tables, and write their sections of docs/benchmarks.md."""
    asked = one_system("free", names[0], device, 0)
    if asked.failure:
        sys.exit(asked.failure)
    rows = fitting_rows(int(asked.output))
    for name in names:
        runs: list[Run] = []
        for turn in range(repeats):
            for system in systems:
                runs.append({**measure(system, name, device, rows), "turn": turn})
                print(json.dumps(runs[-1]), flush=True)
        heading, body = described(name, works(device, rows)[name]), "\n\n".join([table(runs), *notes(runs)])
        card = next((run["card"] for run in runs if "failed" not in run), "")
        show_section(f"throughput-{name}", heading, body, runs, write and bool(card), card)


def one_system(system: str, name: str, device: str, rows: int) -> children.Child:
    return children.run(["-m", "benchmarks.gpus.one_system", system, name, device, str(STEPS), str(rows)])


def measure(system: str, name: str, device: str, rows: int) -> Run:
    """Run one system on one work in a child process."""
    with watched_card(device) as card:
        child = one_system(system, name, device, rows)
    if child.failure:
        return {"system": system, "failed": child.failure}
    figures = child.figures
    seconds, tokens = min(figures["seconds"]), sum(map(sum, works(device, rows)[name].lengths))
    speed = {"tokens_per_second": tokens / seconds, "share": figures["flops"] / seconds / figures["product_rate"]}
    return {**figures, **speed, "system": system, "outside_bytes": card.peak_bytes, "process_bytes": child.peak_bytes}


def table(runs: list[Run]) -> str:
    """The runs of one work as a Markdown table: the best of the repeats, the largest of the peaks."""
    rows = []
    for system in SYSTEMS:
        mine = [run for run in runs if run["system"] == system]
        good = [run for run in mine if "failed" not in run]
        if not good:
            rows += [[system, "-", run["failed"], *["-"] * (len(HEAD) - 3)] for run in mine[:1]]
            continue
        fast = max(good, key=lambda run: run["tokens_per_second"])
        sizes = {key: max(run[key] for run in good) for key in good[0] if key.endswith("_bytes")}
        planned = sizes["planned_bytes"] and f"{sizes['planned_bytes'] / sizes['peak_bytes'] - 1:+.0%}"
        rows.append([
            system, f"{fast['tokens_per_second']:,.0f}", format_size(sizes["peak_bytes"]), planned or "-",
            *(format_size(sizes[key]) if sizes[key] else "-" for key in ("held_bytes", "outside_bytes", "process_bytes")),
            f"{100 * fast['share']:.0f}% of {fast['compute']}",
            *(ratio(good, [run for run in runs if run["system"] == peer]) for peer in PEERS),
        ])  # fmt: skip
    return markdown(HEAD, rows)


def notes(runs: list[Run]) -> list[str]:
    """What a reader of the table must know: how it was run, and whether the bar is kept."""
    good = [run for run in runs if "failed" not in run]
    said = []
    if good:
        size = f", {format_size(good[0]['card_bytes'])}" if good[0]["card_bytes"] else ""
        rate = max(run["product_rate"] for run in good) / 1e12
        said.append(f"{good[0]['card']}{size}; measured product rate {rate:,.1f} TFLOP/s in {good[0]['compute']}.")
    compiled = [run for run in good if run["system"] == "compiled"]
    if compiled:
        longest = max(run["first_seconds"] for run in compiled)
        said.append(f"The first step of `compiled` took {longest:.0f} s, which its speed leaves out.")
        said.append(_bar([run for run in good if run["system"].startswith("ours-")], compiled))
    return said


def _bar(ours: list[Run], compiled: list[Run]) -> str:
    """Whether one of our modes is as fast as the compiled peer in `MEMORY_SHARE` of its memory, in every turn."""
    asked = f"as fast as `compiled` in at most {MEMORY_SHARE:.0%} of its memory"
    keeping = []
    for system in sorted({run["system"] for run in ours}):
        pairs = pairs_of([run for run in ours if run["system"] == system], compiled)
        is_small = all(run["peak_bytes"] <= MEMORY_SHARE * base["peak_bytes"] for run, base in pairs)
        if pairs and is_small and speeds_of(pairs)[0] >= 1:
            keeping.append(f"{system} at {speeds_of(pairs)[0]:.2f} times its speed")
    return f"Target {f'met: {asked}: ' + ', '.join(keeping) if keeping else f'**missed**: no mode is {asked}'}."
