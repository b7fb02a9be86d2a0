"""How does the list of runs fit a terminal? Times get short, then columns go, the least needed first, then names are cut.

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
# said in the user's language
HEAD = ("run", "state", "progress", "loss", "evaluation loss", "peak / budget", "on disk", "started", "ends about")
SHORT_HEADS = {"evaluation loss": "evaluation"}
LEAST_NEEDED = ("started", "on disk", "peak / budget", "loss", "progress", "ends about")  # what goes first


def lines_of(runs: Sequence[dict[str, Any]], columns: int | None = None, now: float | None = None) -> list[str]:
    """The table of runs, and below it what those do that have not come to their first step.

    Args:
        runs: as of `board.runs`, with `bytes`. columns: of the terminal; None: as it is. now: seconds since 1970; None: the clock.
    """
    columns = shutil.get_terminal_size((ENDLESS, 24)).columns if columns is None else columns
    lines, hidden = _fitting(runs, columns, now)
    lines += [line for run in runs if run["state"] == "starting" for line in _beginning(run, now, columns)]
    if hidden:
        told = "not shown here: {columns}; a wider terminal shows them, --json=True too"
        lines += folded(str(say(told, columns=join(", ", map(say, hidden)))), columns, indent=2)
    return lines


def _fitting(runs: Sequence[dict[str, Any]], columns: int, now: float | None) -> tuple[list[str], list[str]]:
    """The widest form of the table that fits, and the names of the columns that are not in it."""
    for is_short, dropped in ((False, 0), *((True, count) for count in range(len(LEAST_NEEDED) + 1))):
        names = [name for name in HEAD if name not in LEAST_NEEDED[:dropped]]
        heads = [SHORT_HEADS.get(name, name) if is_short else name for name in names]
        rows: list[list[str]] = [
            list(map(say, heads)),
            *([_cells(run, now, is_short)[name] for name in names] for run in runs),
        ]
        over = sum(_widths(rows)) + 2 * (len(names) - 1) - columns
        if over <= 0:
            break
        longest = _widths(rows)[0]
        if is_short and (longest - over >= SHORTEST_NAME or dropped == len(LEAST_NEEDED)):
            rows = [[shortened(row[0], longest - over), *row[1:]] for row in rows]
            break
    return [line.rstrip() for line in aligned(rows)], [name for name in HEAD if name not in names]


def _cells(run: dict[str, Any], now: float | None, is_short: bool) -> dict[str, str]:
    state = say("preparing") if run["state"] == "starting" else say(run["state"])
    progress = f"{run['step']:,}" + (f" / {run['max_steps']:,}" if run["max_steps"] else "")
    progress = "-" if run["state"] == "starting" and not run["step"] else progress
    memory = " / ".join("-" if size is None else format_size(size) for size in (run["peak_bytes"], run["budget_bytes"]))
    losses = ("-" if run[name] is None else f"{run[name]:.3f}" for name in ("loss", "eval_loss"))
    ends = "" if run["ends"] is None else _moment(run["ends"], now, is_short)
    cells = run["name"], state, progress, *losses, memory, format_size(run["bytes"]), _moment(run["started"], now, is_short), ends  # fmt: skip
    return dict(zip(HEAD, cells, strict=True))


def _beginning(run: dict[str, Any], now: float | None, columns: int) -> list[str]:
    """Which process prepares a run, since when, and how far it is."""
    doing = run["doing"]
    whose = {"run": run["name"], "number": run["process"] or "?", "time": _moment(run["started"], now, True)}
    told = say("{run}: process {number} prepares it since {time}", **whose)
    if isinstance(doing.get("rows"), int) and isinstance(doing.get("rows_per_second"), (int, float)):
        what = str(doing.get("what", ""))
        split = what.removeprefix("preparing ")
        told = say(
            "{run}: process {number} prepares it since {time}; {what}: {rows} rows so far, {speed} a second",
            what=say(what) if split == what else say("preparing {split}", split=split), rows=f"{doing['rows']:,}",
            speed=f"{doing['rows_per_second']:,.0f}", **whose,
        )  # fmt: skip
    return folded(str(told), columns, indent=2)


def _moment(seconds: float, now: float | None, is_short: bool) -> str:
    """A time of day with its date; short, without what is the same as today's."""
    there, today = time.localtime(seconds), time.localtime(now)
    if is_short and there[:3] == today[:3]:
        return time.strftime("%H:%M", there)
    return time.strftime("%m-%d %H:%M" if is_short and there[0] == today[0] else "%Y-%m-%d %H:%M", there)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(width, column)) for column in zip(*rows, strict=True)]
