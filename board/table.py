"""The list of runs for a terminal: where it does not fit, columns go, the least needed first, then names are cut.

Nothing is left out in silence: a line below the table says what, and where it can be seen.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from typing import Any

from language import join, say
from terminal import aligned, folded, shortened, width
from units import format_size

ENDLESS = 10_000  # columns of a pipe or a file
SHORTEST_NAME = 16
LONGEST_REASON = 400  # letters; the end of a longer one, which may be all that a run has printed
# said in the user's language
HEAD = ("run", "state", "progress", "loss", "evaluation", "peak / budget", "on disk", "started", "ends about")
LEAST_NEEDED = ("started", "on disk", "peak / budget", "loss", "progress", "ends about")  # what goes first


def lines_of(runs: Sequence[dict[str, Any]], columns: int | None = None, now: float | None = None) -> list[str]:
    """The table of runs, and below it what those do that have not come to their first step, and why others have failed.

    Args:
        runs: as of `board.runs`, with `bytes`. columns: of the terminal; None: as it is. now: seconds since 1970; None: the clock.
    """
    columns = shutil.get_terminal_size((ENDLESS, 24)).columns if columns is None else columns
    cells = [_cells(run, now) for run in runs]
    for dropped in range(len(LEAST_NEEDED) + 1):
        names = [name for name in HEAD if name not in LEAST_NEEDED[:dropped]]
        rows: list[list[str]] = [[say(name) for name in names], *([row[name] for name in names] for row in cells)]
        widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
        room = columns - sum(widths[1:]) - 2 * (len(names) - 1)  # for the names of the runs
        if room >= min(widths[0], SHORTEST_NAME):
            break
    rows = [[shortened(row[0], max(room, 1)), *row[1:]] for row in rows]
    lines = [line.rstrip() for line in aligned(rows)]
    lines += [line for run in runs if run["state"] == "starting" for line in _beginning(run, now, columns)]
    for run in runs:
        if run["state"] == "failed" and run["reason"]:
            reason = " ".join(str(run["reason"]).split())
            reason = reason if len(reason) <= LONGEST_REASON else f"... {reason[-LONGEST_REASON:]}"
            lines += folded(say("{run} failed: {reason}", run=run["name"], reason=reason), columns, indent=2)
    if hidden := [name for name in HEAD if name not in names]:
        told = "columns hidden: {columns}; use a wider terminal or --json=True"
        lines += folded(say(told, columns=join(", ", map(say, hidden))), columns, indent=2)
    return lines


def _cells(run: dict[str, Any], now: float | None) -> dict[str, str]:
    state = say("preparing") if run["state"] == "starting" else say(run["state"])
    progress = f"{run['step']:,}" + (f" / {run['max_steps']:,}" if run["max_steps"] else "")
    progress = "-" if run["state"] == "starting" and not run["step"] else progress
    memory = " / ".join("-" if size is None else format_size(size) for size in (run["peak_bytes"], run["budget_bytes"]))
    losses = ("-" if run[name] is None else f"{run[name]:.3f}" for name in ("loss", "eval_loss"))
    ends = "" if run["ends"] is None else _moment(run["ends"], now)
    cells = run["name"], state, progress, *losses, memory, format_size(run["bytes"]), _moment(run["started"], now), ends
    return dict(zip(HEAD, cells, strict=True))


def _beginning(run: dict[str, Any], now: float | None, columns: int) -> list[str]:
    """Which process prepares a run, since when, and how far it is."""
    doing = run["doing"]
    whose = {"run": run["name"], "number": run["process"] or "?", "time": _moment(run["started"], now)}
    told = say("{run}: process {number} has been preparing data since {time}", **whose)
    if isinstance(doing.get("rows"), int) and isinstance(doing.get("rows_per_second"), (int, float)):
        what = str(doing.get("what", ""))
        split = what.removeprefix("preparing ")
        told = say(
            ("{run}: process {number} has been preparing data since {time}; {what}: {rows} rows so far, {speed} per "
            "second"),
            what=say(what) if split == what else say("preparing {split}", split=split), rows=f"{doing['rows']:,}",
            speed=f"{doing['rows_per_second']:,.0f}", **whose,
        )  # fmt: skip
    return folded(told, columns, indent=2)


def _moment(seconds: float, now: float | None) -> str:
    """A time of day with its date, without what is the same as today's."""
    there, today = time.localtime(seconds), time.localtime(now)
    shape = "%H:%M" if there[:3] == today[:3] else "%m-%d %H:%M" if there[0] == today[0] else "%Y-%m-%d %H:%M"
    return time.strftime(shape, there)
