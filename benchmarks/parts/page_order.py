"""The order of docs/benchmarks.md: memory, speed, quality, plan, data.

A page is cut at the marks of its sections and put together again: a summary of all benchmarks and classes of processor on
top, made from the raw figures beside the page, then chapters; in a section, a table of more rows than a screen shows is
folded. Laying out a page twice changes nothing.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from units import format_size

# chapter -> the beginnings of its sections' names, in order; what is in none comes last
CHAPTERS = {
    "Memory": ("contract-keeping", "contract-answers", "contract-budgets", "finetuning-", "encoders-"),
    "Speed": ("gpus", "throughput-t5-small", "throughput-", "busy", "processes", "generation-"),
    "Quality": ("recipe-", "rates-", "quality-", "fp16"),
    "Plan": ("contract-accuracy", "plan-", "time-"),
    "Data": ("data-",),
    "Other": ("",),
}
FOLDED_ROWS = 16  # more of them are folded
SECTION = re.compile(r"<!-- (\S+) on (\S+) -->\n.*?<!-- /\1 on \2 -->\n", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
SUMMARY_HEAD = ("question", "work", "this project", "Hugging Face", "processor")
Row = tuple[str, str, str, str]


def arranged(text: str, title: str, folder: Path) -> str:
    """Lay a page together: title, summary, chapters.

    Args:
        text: the page, with the mark of each section. folder: of the raw figures, a folder in it for each class.
    """
    sections = [(found[1], found[0]) for found in SECTION.finditer(text)]
    came = list(dict.fromkeys(name for name, _ in sections))  # those of one benchmark stay together
    chapters = []
    for chapter, names in CHAPTERS.items():
        mine = [
            (_place(name, names), came.index(name), section) for name, section in sections if chapter == _chapter(name)
        ]
        if mine:
            ordered = [_folded(section) for *_, section in sorted(mine, key=lambda entry: entry[:2])]
            chapters.append("\n".join([f"# {chapter}\n", *ordered]))
    return "\n".join([title, _summary(folder), *chapters])


def _chapter(name: str) -> str:
    return next(chapter for chapter, names in CHAPTERS.items() if name.startswith(names))


def _place(name: str, names: tuple[str, ...]) -> int:
    return next(place for place, beginning in enumerate(names) if name.startswith(beginning))


def _folded(section: str) -> str:
    """Fold the long tables of a section, unless they are."""
    open_part = FOLDED.sub("", section)
    for table in TABLE.findall(open_part):
        rows = table.count("\n") - 2
        if rows > FOLDED_ROWS:
            section = section.replace(table, f"<details><summary>all {rows} rows</summary>\n\n{table}\n</details>\n")
    return section


def _summary(folder: Path) -> str:
    """The table on top: one line for each file of figures that has one to tell."""
    lines = []
    for path in sorted(folder.glob("*/*.json")):
        tells = next((tell for name, tell in TELLING.items() if path.stem.startswith(name)), None)
        figures = json.loads(path.read_text(encoding="utf8"))["figures"] if tells else None
        lines += [(*row, path.parent.name) for row in (tells(path.stem, figures) if tells else ())]
    order = [chapter.lower() for chapter in CHAPTERS]
    lines.sort(key=lambda line: (order.index(line[0]), line[4], line[1]))
    if not lines:
        return ""
    return "\n".join("| " + " | ".join(line) + " |" for line in (SUMMARY_HEAD, ("---",) * 5, *lines)) + "\n"


def _best(runs: list[dict[str, Any]], systems: str) -> dict[str, tuple[float, str]]:
    """Of the systems whose name begins so: the least peak and the highest speed, each with the system's name."""
    good = [run for run in runs if run["system"].startswith(systems) and "failed" not in run]
    if not good:
        return {}
    peaks: dict[str, float] = {}
    for run in good:
        peaks[run["system"]] = max(run["peak_bytes"], peaks.get(run["system"], 0))
    fast = max(good, key=lambda run: run["tokens_per_second"])
    least = min(peaks, key=lambda system: peaks[system])
    return {"peak": (peaks[least], least), "speed": (fast["tokens_per_second"], fast["system"])}


def _throughput(name: str, runs: list[dict[str, Any]]) -> Iterator[Row]:
    work, ours = f"a step of {name.removeprefix('throughput-')}", _best(runs, "ours-")
    peer = _best(runs, "tuned") or _best(runs, "shipped")
    for question, figure, shown in (("memory", "peak", format_size), ("speed", "speed", _speed)):
        sides = [
            f"{shown(side[figure][0])} ({side[figure][1].removeprefix('ours-')})" if side else "-"
            for side in (ours, peer)
        ]
        yield question, work, sides[0], sides[1]


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f} tokens/s"


def _finetuning(name: str, runs: list[dict[str, Any]]) -> Iterator[Row]:
    sides = {
        side: [run["peak_bytes"] for run in runs if run["kind"] == "full" and run["side"] == side]
        for side in ("ours", "peer")
    }
    if all(sides.values()):
        work = f"finetuning all weights of {name.removeprefix('finetuning-')}"
        yield "memory", work, format_size(min(sides["ours"])), format_size(min(sides["peer"]))


def _recipe(name: str, figures: dict[str, Any]) -> Iterator[Row]:
    ours, work = figures["ours"], f"recipe {name.removeprefix('recipe-')}"
    peer = figures.get("peer") or figures.get("peer_equal_time")
    if peer is None:
        return
    score = next(
        word for word in ("wer", "rouge_l", "chrf", "char_bleu", "geometric_mean", "exact_match") if word in ours
    )
    yield "memory", work, format_size(ours["peak_bytes"]), format_size(peer["peak_bytes"])
    yield (
        "quality", f"{work}, {score}", f"{ours[score]:.1f} in {ours['seconds'] / 60:.0f} min",
        f"{peer[score]:.1f} in {peer['seconds'] / 60:.0f} min",
    )  # fmt: skip


def _accuracy(name: str, cases: list[dict[str, Any]]) -> Iterator[Row]:
    errors = [abs(case["predicted"] / case["measured"] - 1) for case in cases if case["exit"] == 0]
    yield (
        "plan",
        f"peak predicted, {len(errors)} configurations",
        f"median error {statistics.median(errors):.1%}",
        "no plan",
    )


def _keeping(name: str, cases: list[dict[str, Any]]) -> Iterator[Row]:
    killed = sum(case["exit"] not in (0, 3) for case in cases)
    yield "memory", f"{len(cases)} runs under a hard limit of their budget", f"{killed} killed", "no budget"


def _encoders(name: str, runs: list[dict[str, Any]]) -> Iterator[Row]:
    good = [run for run in runs if "failed" not in run]
    ours, peer = (
        [run for run in good if run["side"] == side and run["way"] in ways]
        for side, ways in (("ours", ("standard", "low", "ultra")), ("peer", ("shipped",)))
    )
    if ours and peer:
        work, least, fastest = (
            "LoRA with a token head on an encoder",
            min(ours, key=_peak),
            min(ours, key=_step_seconds),
        )
        yield "memory", work, f"{format_size(_peak(least))} ({least['way']})", format_size(max(map(_peak, peer)))
        seconds = min(map(_step_seconds, peer))
        yield "speed", work, f"{_step_seconds(fastest):.1f} s a step ({fastest['way']})", f"{seconds:.1f} s a step"


def _peak(run: dict[str, Any]) -> int:
    return int(run["peak_bytes"])


def _step_seconds(run: dict[str, Any]) -> float:
    return statistics.mean(run["seconds"])


def _long_proteins(name: str, runs: list[dict[str, Any]]) -> Iterator[Row]:
    for run in runs:
        work = f"LoRA on the shape of {run['name']}, {run['residues']:,} residues, limit {format_size(run['limit'])}"
        yield "memory", work, run["failed"] if "failed" in run else format_size(run["peak_bytes"]), "-"


def _encoder_plans(name: str, runs: list[dict[str, Any]]) -> Iterator[Row]:
    errors = [abs(run["planned"] / run["peak_bytes"] - 1) for run in runs if "failed" not in run]
    work = f"peak predicted, {len(errors)} encoders with heads"
    yield "plan", work, f"median error {statistics.median(errors):.1%}", "no plan"


TELLING: dict[str, Callable[[str, Any], Iterator[Row]]] = {
    "throughput-": _throughput, "finetuning-": _finetuning, "recipe-": _recipe, "contract-accuracy": _accuracy,
    "contract-keeping": _keeping, "encoders-peer": _encoders, "encoders-proteins": _long_proteins, "plan-encoders": _encoder_plans,
}  # fmt: skip
