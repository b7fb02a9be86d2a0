"""`runs`: list runs in the terminal, or delete one.

Where the table does not fit the terminal, columns go, the least needed first, then names are cut. Nothing is left out
in silence: a line below the table says what, and where it can be seen.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from board.reader import Folders, Outside
from board.runs import delete_run, list_runs, size_of
from settings.declared import Config
from settings.errors import UserError, reason_of, refuse
from settings.program import program
from support.language import join, say
from support.screen import visible
from support.terminal import aligned, folded, shortened, width
from support.units import format_size
from training.report.run_files import number_of

ENDLESS = 10_000  # columns of a pipe or a file
SHORTEST_NAME = 16
LONGEST_REASON = 400  # characters; of a longer one, which may be all that a run has printed, the end
# Said in the user's language.
HEAD = ("run", "state", "progress", "loss", "evaluation", "peak / budget", "on disk", "started", "ends about")
LEAST_NEEDED = ("started", "on disk", "peak / budget", "loss", "progress", "ends about")  # the first goes first


def folders_of(log_dir: str, output_dir: str, data_dir: str) -> Folders:
    """The folders that the settings name.

    Raises:
        UserError: one of them is a file.
    """
    folders = {"log_dir": log_dir, "output_dir": output_dir, "data_dir": data_dir}
    refuse(
        [
            say("--{flag} = {path}, is a file; give a folder", flag=flag, path=path)
            for flag, path in folders.items()
            if Path(path).is_file()
        ]
    )
    return Folders(*(Path(folder).absolute() for folder in folders.values()))


def runs(config: Config) -> None:
    """List the runs, or delete one after a question.

    Raises:
        UserError: there is no such run, it is alive, or nobody can be asked.
    """
    folders = folders_of(config.run.log_dir, config.run.output_dir, config.board.data_dir)
    if config.listing.delete is not None:
        _delete(folders, config.listing.delete, config.listing.yes)
        return
    listed = [{**run, "bytes": size_of(folders, run["name"])} for run in list_runs(folders)]
    if config.plan.json:
        print(json.dumps(listed, ensure_ascii=False, indent=1))
    elif listed:
        columns = shutil.get_terminal_size((ENDLESS, 24)).columns
        print("\n".join(visible(line) for line in lines_of(listed, columns)))
    else:
        print(
            say(
                "no runs in {logs} and {models}; start one: {program} train",
                logs=config.run.log_dir,
                models=config.run.output_dir,
                program=program(),
            )
        )


def _delete(folders: Folders, name: str, is_sure: bool) -> None:
    names = folders.names()
    if name not in names:
        existing = join(", ", names[:20]) or say("none")
        raise UserError("--delete = {name}, is not a run; existing runs: {known}", name=name, known=existing)
    size = format_size(size_of(folders, name))
    if not is_sure:
        if not sys.stdin.isatty():
            raise UserError(
                "--delete = {name}, needs a terminal to confirm; add --yes=True to delete {size} permanently",
                name=name,
                size=size,
            )
        question = say(
            "permanently delete {run}, {size} with model and checkpoints? [y/N] ", run=visible(name), size=size
        )
        if input(question).strip().lower() not in ("y", "yes"):
            print(say("nothing was deleted"))
            return
    try:
        problem = delete_run(folders, name)
    except (OSError, Outside) as error:
        problem = reason_of(error)
    if problem:
        raise UserError("--delete = {name}, was not deleted: {problem}", name=name, problem=problem)
    print(say("{run} deleted, {size} freed", run=visible(name), size=size))


def lines_of(listed: Sequence[dict[str, Any]], columns: int, now: float | None = None) -> list[str]:
    """The table of runs, and below it what those do that have not come to their first step, and why others have failed.

    Args:
        listed: as of `board.runs`, with `bytes`. columns: of the terminal. now: seconds since 1970; None: the clock.
    """
    cells = [_cells(run, now) for run in listed]
    widths = {name: max(width(say(name)), *(width(row[name]) for row in cells)) for name in HEAD}
    names = list(HEAD)

    def name_columns() -> int:
        """What the other columns leave for the names of the runs."""
        return columns - sum(widths[name] + 2 for name in names[1:])

    for name in LEAST_NEEDED:
        if name_columns() >= min(widths["run"], SHORTEST_NAME):
            break
        names.remove(name)
    rows = [[shortened(row["run"], max(1, name_columns())), *(row[name] for name in names[1:])] for row in cells]
    lines = [line.rstrip() for line in aligned([[say(name) for name in names], *rows])]
    below = [_preparation(run, now) for run in listed if run["state"] == "starting"]
    for run in listed:
        if run["state"] == "failed" and run["reason"]:
            reason = " ".join(str(run["reason"]).split())
            reason = reason if len(reason) <= LONGEST_REASON else f"... {reason[-LONGEST_REASON:]}"
            below.append(say("{run} failed: {reason}", run=run["name"], reason=reason))
    if len(names) < len(HEAD):
        hidden = join(", ", [say(name) for name in HEAD if name not in names])
        below.append(say("columns hidden: {columns}; use a wider terminal or --json=True", columns=hidden))
    return [*lines, *(part for line in below for part in folded(line, columns, indent=2))]


def _cells(run: dict[str, Any], now: float | None) -> dict[str, str]:
    steps = f"{run['step']:,}"
    return {
        "run": run["name"],
        "state": say("preparing") if run["state"] == "starting" else say(run["state"]),
        "progress": f"{steps} / {run['max_steps']:,}" if run["max_steps"] else steps,
        "loss": _shown(run["loss"], "{:.3f}".format),
        "evaluation": _shown(run["eval_loss"], "{:.3f}".format),
        "peak / budget": " / ".join(_shown(run[name], format_size) for name in ("peak_bytes", "budget_bytes")),
        "on disk": format_size(run["bytes"]),
        "started": _moment(run["started"], now),
        "ends about": "" if run["ends"] is None else _moment(run["ends"], now),
    }


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _preparation(run: dict[str, Any], now: float | None) -> str:
    """Which process prepares a run, since when, and how far it is."""
    values = {"run": run["name"], "number": run["process"] or "?", "time": _moment(run["started"], now)}
    rows = number_of(run["doing"].get("rows"))
    speed = number_of(run["doing"].get("rows_per_second"))
    if rows is None or speed is None:
        return say("{run}: process {number} has been preparing data since {time}", **values)
    return say(
        "{run}: process {number} has been preparing data since {time}: {rows} rows so far, {speed} per second",
        rows=f"{rows:,}",
        speed=f"{speed:,.0f}",
        **values,
    )


def _moment(seconds: float, now: float | None) -> str:
    """A time of day, with its date unless that is today's."""
    moment = time.localtime(seconds)
    is_today = moment[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", moment)
