"""What the page of benchmarks says of plans, budgets and hard limits: tables of the cases of `contract`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.page import SummaryRow, markdown
from support.units import format_size

ROOM_ABOVE_BUDGET = 0.05  # of the hard limit


def deviation(case: dict[str, Any], name: str) -> float:
    """Predicted over measured, less one."""
    return float(case[name]) / float(case["measured"]) - 1.0


def accuracy_body(cases: list[dict[str, Any]]) -> str:
    """Table and figures of the accuracy cases."""
    done = [case for case in cases if case["exit"] == 0]
    lines = []
    for name, words in (("unprobed", "before the probe"), ("predicted", "after the probe")):
        errors = [deviation(case, name) for case in done]
        lines.append(
            f"{words}: median error {statistics.median(map(abs, errors)):.1%}, from {min(errors):+.1%} to "
            f"{max(errors):+.1%}"
        )
    rows = list[list[str]]()
    ratios = list[float]()
    for case in done:
        words = " ".join(f"{name}={value}" for name, value in case["flags"].items())
        row = [words, format_size(case["measured"])]
        row += [f"{format_size(case[name])} ({deviation(case, name):+.1%})" for name in ("unprobed", "predicted")]
        if case.get("step_seconds"):
            ratios.append(case["planned_seconds"] / case["step_seconds"] - 1.0)
            row.append(f"{case['step_seconds']:.2f} ({ratios[-1]:+.0%})")
        rows.append(row)
    if ratios:
        lines.append(f"seconds of a step: planned over taken, median error {statistics.median(map(abs, ratios)):.0%}")
    head = f"{len(done)} configurations; predicted over measured peak (anonymous memory of the process): {'; '.join(lines)}."
    table = markdown(
        ["configuration", "measured", "predicted before the probe", "after", "s a step (planned)"],
        [[*row, ""][:5] for row in rows],
    )
    return f"{head}\n\n{table}"


def accuracy_summary(cases: list[dict[str, Any]]) -> list[SummaryRow]:
    """The median error of the plans."""
    errors = [abs(deviation(case, "predicted")) for case in cases if case["exit"] == 0]
    figure = f"median error {statistics.median(errors):.1%}"
    return [("plan", f"peak predicted, {len(errors)} configurations", figure, "no plan")]


def keeping_summary(cases: list[dict[str, Any]]) -> list[SummaryRow]:
    """How many runs were killed."""
    killed = sum(case["exit"] not in (0, 3) for case in cases)
    return [("memory", f"{len(cases)} runs under a hard limit of their budget", f"{killed} killed", "no budget")]


def keeping_body(cases: list[dict[str, Any]]) -> str:
    """Table of the runs under a hard limit."""
    outcomes = {0: "finished", 3: "refused before training"}
    rows = [
        [
            " ".join(f"{k}={v}" for k, v in case["flags"].items()),
            outcomes.get(case["exit"], f"exit code {case['exit']}")
            if case["exit"] != 3 or not case["trained"]
            else "refused late",
            format_size(case["measured"]),
            "" if case["predicted"] is None else format_size(case["predicted"]),
        ]
        for case in cases
    ]
    killed = sum(case["exit"] not in (0, 3) for case in cases)
    finished = sum(case["exit"] == 0 for case in cases)
    return (
        f"{len(cases)} runs under a hard limit of budget + {ROOM_ABOVE_BUDGET:.0%}: {finished} finished, {killed} "
        f"killed or failed, "
        f"the others refused.\n\n" + markdown(["configuration", "outcome", "peak", "planned"], rows)
    )


def budgets_body(cases: list[dict[str, Any]]) -> str:
    """Table of one model's speed under rising budgets."""
    rows = []
    for case in cases:
        c, flags = case["choice"], case["flags"]
        way = (
            f"{c['batch_size_per_gpu']} x {c['micro_batches_per_pass'] * c['accumulation_passes']}, "
            f"{c['saved_blocks']} blocks saved, weights in {c['storage']}"
            if case["exit"] == 0
            else f"exit code {case['exit']}"
        )
        speed = case["tokens_per_second"] / max(cases[0]["tokens_per_second"], 1e-9)
        rows.append(
            [
                flags["memory_budget"],
                way,
                format_size(case["measured"]),
                f"{case['tokens_per_second']:.0f}",
                f"{speed:.2f}",
            ]
        )
    return "t5-base, effective batch 16, pairs of up to 256 tokens.\n\n" + markdown(
        ["budget", "plan", "measured peak", "tokens/s", "relative to the smallest budget"], rows
    )
