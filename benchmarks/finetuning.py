"""Memory and speed of finetuning beside transformers and PEFT: `python -m benchmarks.finetuning [--name=value ...]`.

    --model=chatlm-0.2b     shape of the base, with random weights     --pairs=FILE   prompts and responses; else the
    sample --rows=16 --steps=2     rows of one step, timed steps after one    --source=256 --target=256   longest rows,
    in tokens --systems=ours-full,... of ours- full frozen lora lora-int8 dpo dpo-lora, and peer- full frozen lora
    --modes=standard,ultra  memory modes of ours                       --repeats=1    turns
    --variants=1,2,16,1c,16c  rows of a micro-batch of the peer; c: with gradient checkpointing
    --write=True            into docs/benchmarks.md

Every system runs in a child process of its own, alone, one after the other, on the same rows from the same base,
dropout 0.1. Ours is the command `train` or `dpo` as users type it, from loading to saving; the peer is a bare loop in
fp32 with AdamW. Of each, the way of least memory and the fastest way are shown.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.page import ROOT, SummaryRow, markdown, show_section
from benchmarks.parts import children
from benchmarks.parts.finetuning_data import Setting
from benchmarks.parts.rows import read_rows
from support.units import format_size

LORA = {"lora_rank": "8", "lora_alpha": "16"}
KINDS: dict[str, tuple[str, dict[str, str]]] = {  # kind -> command and flags
    "full": ("train", {}),
    "frozen": ("train", {"freeze": "encoder,embedding"}),
    "lora": ("train", LORA),
    "lora-int8": ("train", {**LORA, "lora_base": "int8"}),
    "dpo": ("dpo", {}),
    "dpo-lora": ("dpo", LORA),
}
TOLD = {
    "full": "all weights",
    "frozen": "encoder and embedding frozen",
    "lora": "LoRA",
    "lora-int8": "LoRA on int8",
    "dpo": "DPO, all weights",
    "dpo-lora": "DPO, LoRA",
}
PEER_KINDS = ("full", "frozen", "lora")
SYSTEMS = (*(f"ours-{kind}" for kind in KINDS), *(f"peer-{kind}" for kind in PEER_KINDS))
SIDES = {"ours": "this project", "peer": "transformers + PEFT"}
OPTIONS = {
    "model": "chatlm-0.2b",
    "pairs": "",
    "rows": "16",
    "steps": "2",
    "source": "256",
    "target": "256",
    "systems": ",".join(SYSTEMS),
    "modes": "standard,ultra",
    "variants": "1,2,16,1c,16c",
    "repeats": "1",
    "write": "True",
}
DPO_BAR = 1.3  # of supervised finetuning at the same batch


@dataclass(frozen=True)
class Case:
    """One system run in one way: a memory mode of ours, or the micro-batch and checkpointing of the peer."""

    side: str
    kind: str
    way: str

    @property
    def words(self) -> str:
        """The way in words."""
        if self.side == "ours":
            return f"`--memory_mode={self.way}`"
        return f"micro-batch {self.way.rstrip('c')}" + (", gradient checkpointing" if self.way.endswith("c") else "")


def measure(case: Case, setting: Setting) -> dict[str, Any]:
    """Run one system in a child process; its figures, or why it failed."""
    child = children.run(ours_words(case, setting) if case.side == "ours" else peer_words(case, setting))
    facts = {"side": case.side, "kind": case.kind, "way": case.way}
    if child.failure:
        return {**facts, "failed": child.failure}
    found = ours_figures(setting) if case.side == "ours" else child.figures
    return {
        **facts,
        **found,
        "peak_bytes": child.peak_bytes,
        "high_water_bytes": child.high_water_bytes,
        "rows_per_second": setting.rows * len(found["seconds"]) / sum(found["seconds"]),
    }


def ours_words(case: Case, setting: Setting) -> list[str]:
    """The command line of our program."""
    command, flags = KINDS[case.kind]
    places = {"output_dir": setting.folder / "runs", "log_dir": setting.folder / "logs", "run_name": "ours"}
    once = {
        "overwrite": True,
        "eval_steps": setting.steps,
        "save_steps": setting.steps,
        "eval_rows": 8,
        "sample_rows": 0,
    }
    every = {**setting.flags(command), **flags, **places, **once, "memory_mode": case.way}
    return [str(ROOT / "train_low_mem.py"), command, *children.words_of(every)]


def ours_figures(setting: Setting) -> dict[str, Any]:
    """Seconds and losses of the steps, as the run has written them down; its model is not kept."""
    events = read_rows(setting.folder / "logs" / "ours" / "metrics.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    shutil.rmtree(setting.folder / "runs")
    return {"seconds": [event["seconds"] for event in steps[1:]], "losses": [event["loss"] for event in steps]}


def peer_words(case: Case, setting: Setting) -> list[str]:
    """The command line of the peer."""
    recompute = "yes" if case.way.endswith("c") else "no"
    files = [str(setting.folder / "base"), str(setting.folder / "batches.json")]
    return ["-m", "benchmarks.parts.finetuning_peer", case.kind, case.way.rstrip("c"), recompute, *files]


def least(runs: list[dict[str, Any]], what: str = "peak_bytes") -> dict[str, Any] | None:
    """The run of the smallest peak: "peak_bytes", or "high_water_bytes" with the pages of files."""
    return min((run for run in runs if "failed" not in run), key=lambda run: run[what], default=None)


def fastest(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The run of the most rows a second."""
    return max((run for run in runs if "failed" not in run), key=lambda run: run["rows_per_second"], default=None)


def of(runs: list[dict[str, Any]], side: str, kind: str) -> list[dict[str, Any]]:
    """The runs of one system: of each way, the fastest of its turns with the largest peak of any."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if (run["side"], run["kind"]) == (side, kind):
            ways.setdefault(run["way"], []).append(run)
    told = []
    for turns in ways.values():
        good = [turn for turn in turns if "failed" not in turn]
        best = fastest(turns)
        peaks = {name: max((turn[name] for turn in good), default=0) for name in ("peak_bytes", "high_water_bytes")}
        told.append({**best, **peaks} if best else turns[0])
    return told


def table(runs: list[dict[str, Any]]) -> str:
    """A line a system: its way of least memory and its fastest way."""
    rows = []
    for kind, words in TOLD.items():
        for side, name in SIDES.items():
            mine = of(runs, side, kind)
            small, fast = least(mine), fastest(mine)
            if small is None or fast is None:
                rows += [[words, name, f"{run['failed']}", "-", "-", "-", "-"] for run in mine[:1]]
                continue
            rows.append(
                [
                    words,
                    name,
                    f"{format_size(small['peak_bytes'])} ({format_size(small['high_water_bytes'])})",
                    f"{small['rows_per_second']:.2f}",
                    way_words(small),
                    f"{fast['rows_per_second']:.2f} at {format_size(fast['peak_bytes'])}",
                    way_words(fast),
                ]
            )
    head = ["trained weights", "by", "lowest peak (VmHWM)", "rows/s at that peak", "how", "fastest, rows/s", "how"]
    return markdown(head, rows)


def way_words(run: dict[str, Any]) -> str:
    """How a run was run."""
    return Case(run["side"], run["kind"], run["way"]).words


def verdicts(runs: list[dict[str, Any]]) -> list[str]:
    """The bars, each in a sentence, where what they compare was measured."""
    said = []
    resident, anonymous = (_full_and_lora(runs, what) for what in ("high_water_bytes", "peak_bytes"))
    if resident and anonymous:
        holds = "met" if resident[0] < resident[1] else "**missed**"
        said.append(
            f"Target {holds}: training all weights here takes less resident memory of the whole process than LoRA "
            f"there: {_beside(resident)}. Anonymous memory alone: {_beside(anonymous)}; it leaves out the peer's "
            f"frozen weights, "
            "which stay mapped from their file and are read in every step."
        )
    pairs = {run["way"]: run for run in of(runs, "ours", "full") if "failed" not in run}
    ratios = [
        run["peak_bytes"] / pairs[run["way"]]["peak_bytes"]
        for run in of(runs, "ours", "dpo")
        if "failed" not in run and run["way"] in pairs
    ]
    if ratios:
        holds = "met" if max(ratios) <= DPO_BAR else "**missed**"
        told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        said.append(
            f"Target {holds}: DPO takes at most {DPO_BAR} of supervised finetuning with as many prompts: {told}."
        )
    return said


def _full_and_lora(runs: list[dict[str, Any]], what: str) -> tuple[int, int] | None:
    """The least memory in which all weights learn here, and LoRA there."""
    full, lora = least(of(runs, "ours", "full"), what), least(of(runs, "peer", "lora"), what)
    return (full[what], lora[what]) if full and lora else None


def _beside(pair: tuple[int, int]) -> str:
    return f"{format_size(pair[0])} to {format_size(pair[1])}, {pair[0] / max(1, pair[1]):.2f} of it"


def about(setting: Setting) -> str:
    """What was run, in words."""
    rows = "pairs of " + (setting.pairs.rpartition("/")[2] if setting.pairs else "the built-in sample")
    return (
        f"Steps of {setting.rows} {rows}, at most {setting.source} + {setting.target} tokens, dropout 0.1. Peaks are "
        "anonymous memory of the whole tree: this project's with loading, evaluation and saving, the peer's with "
        "loading. The peer is a bare loop in fp32 with AdamW, its rows sorted by length to reduce padding. A row of "
        "DPO has two answers."
    )


def summary(model: str, runs: list[dict[str, Any]]) -> list[SummaryRow]:
    """The least peak of this project and of the peer, all weights trained."""
    peaks = {
        side: [
            run["peak_bytes"] for run in runs if run["kind"] == "full" and run["side"] == side and "failed" not in run
        ]
        for side in ("ours", "peer")
    }
    if not all(peaks.values()):
        return []
    work = f"finetuning all weights of {model}"
    return [("memory", work, format_size(min(peaks["ours"])), format_size(min(peaks["peer"])))]


def main(arguments: list[str]) -> None:
    """Measure the systems, print the table and write it."""
    words, options = children.options_of(arguments, OPTIONS, str(__doc__))
    systems = options["systems"].split(",")
    if unknown := [*words, *(name for name in systems if name not in SYSTEMS)]:
        sys.exit(f"unknown: {', '.join(unknown)}; systems are {', '.join(SYSTEMS)}")
    counts = {name: int(options[name]) for name in ("rows", "source", "target")}
    setting = Setting(options["model"], options["pairs"] or None, steps=int(options["steps"]) + 1, **counts)
    setting.make()
    ways = {"ours": options["modes"].split(","), "peer": options["variants"].split(",")}
    runs = []
    for turn in range(int(options["repeats"])):
        for system in systems:
            side, _, kind = system.partition("-")
            for way in ways[side]:
                runs.append({**measure(Case(side, kind, way), setting), "turn": turn})
                print(json.dumps(runs[-1]), flush=True)
    heading = f"Finetuning {setting.model}, compared with transformers and PEFT"
    body = "\n\n".join([about(setting), table(runs), *verdicts(runs)])
    is_written = options["write"] == "True"
    show_section(
        f"finetuning-{setting.model}", heading, body, runs, summary(setting.model, runs), is_written=is_written
    )


if __name__ == "__main__":
    main(sys.argv[1:])
