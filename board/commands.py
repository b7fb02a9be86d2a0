"""`runs`: list runs in the terminal, or delete one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from board.places import Outside, Places
from board.runs import delete_run, list_runs, size_of
from board.table import lines_of
from language import join, say
from screen import visible
from settings.declared import Config
from settings.errors import UserError, reason_of, refuse
from settings.program import program
from units import format_size


def places_of(config: Config) -> Places:
    """The folders that the settings name.

    Raises:
        UserError: one of them is a file.
    """
    named = {"log_dir": config.run.log_dir, "output_dir": config.run.output_dir, "data_dir": config.board.data_dir}
    problems = [
        say("--{flag} = {path}, is a file; give a folder", flag=flag, path=path)
        for flag, path in named.items()
        if Path(path).is_file()
    ]
    refuse(problems)
    return Places(*(Path(folder).absolute() for folder in named.values()))


def runs(config: Config) -> None:
    """List the runs, or delete one after a question.

    Raises:
        UserError: there is no such run, it is alive, or nobody can be asked.
    """
    places = places_of(config)
    if config.listing.delete is not None:
        _delete(places, config.listing.delete, config.listing.yes)
        return
    found = [{**run, "bytes": size_of(places, run["name"])} for run in list_runs(places)]
    if config.plan.json:
        print(json.dumps(found, ensure_ascii=False, indent=1))
        return
    if not found:
        told = "no runs in {logs} and {models}; start one: {program} train"
        print(say(told, logs=config.run.log_dir, models=config.run.output_dir, program=program()))
        return
    for line in lines_of(found):
        print(visible(line))


def _delete(places: Places, name: str, is_sure: bool) -> None:
    if name not in (names := places.names()):
        known = join(", ", names[:20]) or say("none")
        raise UserError("--delete = {name}, is not a run; existing runs: {known}", name=name, known=known)
    size = format_size(size_of(places, name))
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
        problem = delete_run(places, name)
    except (OSError, Outside) as error:
        problem = reason_of(error)
    if problem:
        raise UserError("--delete = {name}, was not deleted: {problem}", name=name, problem=problem)
    print(say("{run} deleted, {size} freed", run=visible(name), size=size))
