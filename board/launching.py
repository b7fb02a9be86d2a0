"""Runs that outlive the page: child processes in sessions of their own, started from a queue of files.

What is asked for is written to `logs/<run>/launch.json` first and started from there: a page that is closed or restarted
loses nothing, and whatever waits is seen by every browser. The oldest that waits is planned beside the runs that live;
where it does not fit it goes on waiting, and where it would not fit an empty machine it is refused with the reasons.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import childproc
from board.places import Outside, Places, is_run_name
from board.planning import PROGRAM, Flags, Planner, goes_on, still_to_take, words_of
from board.runs import ALIVE, delete_run, list_runs, run_facts
from language import say
from run_files import LAUNCH_FILE, REQUEST_FILE, read_record
from settings.errors import UserError
from settings.loading import load
from storage import write_text
from units import MIB

QUEUE_SECONDS = 2.0
# how long memory may be short with no run beside it: a talk is closed after ten quiet minutes, and a run that has just ended
# gives its memory back a moment later
PATIENCE_SECONDS = 660.0
LOOK_AGAIN_SECONDS = 30.0  # a plan takes a second of the processor that others train on
DOES_NOT_FIT = 3
# what a session is on Windows: the page's Ctrl-C is not for its runs
OWN_GROUP = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
SAVE, STOP = WISHES = ("save", "stop")


@dataclass
class Launcher:
    """Starts runs, keeps the queue, and passes wishes on.

    Args:
        folder: where the runs' relative paths begin.
    """

    places: Places
    planner: Planner
    folder: Path
    program: tuple[str, ...] = PROGRAM
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _looked: tuple[float, object] = (-math.inf, None)  # when the queue was last planned, and beside what
    # since when memory is short for the next run, with none beside it
    _short: dict[str, float] = field(default_factory=dict)
    # held from a look at a run's files until what follows from it is written: requests come in threads
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def ask(self, name: str, command: str, flags: Flags) -> None:
        """Put a run into the queue.

        Raises:
            UserError: the settings are wrong, or the name is taken. Outside: the name is none.
        """
        own = {"run_name": name, "log_dir": str(self.places.log_dir), "output_dir": str(self.places.output_dir)}
        flags = {**flags, **own}
        load(command, flags)
        with self._lock:
            self._claim(name, goes_on(flags))
            self._write(name, {"asked": time.time(), "command": command, "flags": flags, "process": None})

    def ask_anew(self, stem: str, command: str, flags: Flags) -> str:
        """Put a run into the queue under the first of `stem`, `stem_2`, `stem_3` ... that is free. Returns its name.

        Raises:
            UserError, Outside: see `ask`.
        """
        with self._lock:
            names = (stem if number == 1 else f"{stem}_{number}" for number in count(1))
            name = next(one for one in names if not self._is_there(one))
            self.ask(name, command, flags)
            return name

    def _is_there(self, name: str) -> bool:
        return self.places.logs(name).exists() or self.places.saved(name).exists()

    def _claim(self, name: str, is_resumed: bool) -> None:
        """Make the folder of a run that may be asked for; that of a new run here alone, also beside another page.

        Raises:
            UserError: the name is taken, or there is nothing to go on from.
        """
        is_there, is_saved = self._is_there(name), self.places.saved(name).exists()
        taken = UserError(say("--run_name = {run}, exists already; choose another name", run=name))
        if is_resumed and not is_saved:
            raise UserError(
                say(
                    "--run_name = {run}, has no checkpoint to resume from; start a new run under another name", run=name
                )
            )
        if (is_saved and not is_resumed) or (is_there and run_facts(self.places, name)["state"] in (*ALIVE, "waiting")):
            raise taken
        try:
            self.places.logs(name).mkdir(parents=True, exist_ok=is_there)
        except FileExistsError:
            raise taken from None

    def withdraw(self, name: str) -> None:
        """Take a run out of the queue."""
        with self._lock:
            if run_facts(self.places, name)["state"] == "waiting":
                (self.places.logs(name) / LAUNCH_FILE).unlink(missing_ok=True)
                with suppress(OSError):
                    self.places.logs(name).rmdir()

    def delete(self, name: str) -> str:
        """Remove a run with all that it has written; see `delete_run`."""
        with self._lock:
            return delete_run(self.places, name)

    def wish(self, name: str, word: str) -> None:
        """Ask a run to `save` now, or to `stop` behind its step.

        Raises:
            Outside: the run or the word is unknown.
        """
        folder = self.places.logs(name)
        if word not in WISHES or not folder.is_dir():
            raise Outside(say("{word!r} is not a request that {name} accepts", word=word[:20], name=name))
        with self._lock:
            with suppress(OSError):
                if (folder / REQUEST_FILE).read_text(encoding="utf8", errors="replace").strip() == STOP:
                    return  # which saves as well
            write_text(folder / REQUEST_FILE, word + "\n")

    async def work(self) -> None:
        """Look after children and queue until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.count_ended)
                await self.start_next()
            except Exception as error:
                print(f"queue: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(QUEUE_SECONDS)

    async def start_next(self) -> str | None:
        """Start the oldest run that waits, if it fits now. Returns its name if it was started."""
        names = [path.parent.name for path in self.places.log_dir.glob(f"*/{LAUNCH_FILE}")]
        launches = {name: record for name in names if is_run_name(name) and _waits(record := self._launch(name))}
        runs = await asyncio.to_thread(list_runs, self.places) if launches else []
        others = [run["name"] for run in runs if run["state"] in ALIVE]
        # what runs already waits for nothing
        waiting = [run["name"] for run in runs if run["state"] == "waiting" and run["name"] in launches]
        if not waiting:
            return None
        name = min(waiting, key=lambda name: launches[name]["asked"])
        record = launches[name]
        looked_at = (name, record["asked"], *others)
        if self._looked[1] == looked_at and time.monotonic() - self._looked[0] < LOOK_AGAIN_SECONDS:
            return None
        try:
            found = await self.planner.plan(record["flags"], still_to_take(runs), fresh_seconds=0.0)
        finally:
            self._looked = time.monotonic(), looked_at
        return await asyncio.to_thread(self._follow, name, record, found, others)

    def _follow(self, name: str, record: dict[str, Any], found: dict[str, Any], others: list[str]) -> str | None:
        """Do with a run what its plan says. Returns its name if it was started.

        Args:
            record: that was planned; where another stands there by now, the run was withdrawn, deleted or asked for anew.
            others: runs that are alive.
        """
        is_short, now = "plan" not in found and found["exit_code"] == DOES_NOT_FIT, time.time()
        since = now if others else self._short.get(name, now)
        self._short = {name: since} if is_short else {}
        with self._lock:
            if self._launch(name) != record:
                return None
            if "plan" not in found and (not is_short or (not others and now - since >= PATIENCE_SECONDS)):
                self._write(name, {**record, "refused": "\n".join(found["problems"])})
            elif is_short or not found["fits_now"]:
                self._write(name, {**record, "why": ", ".join(others)})
            else:
                return self._start(name, record, found)
        return None

    def _start(self, name: str, record: dict[str, Any], found: dict[str, Any]) -> str:
        flags = dict(record["flags"])
        if found["reserved_bytes"]:
            flags["memory_budget"] = f"{int(found['plan']['budget_bytes']) // MIB}M"
        folder = self.places.logs(name)
        with (folder / "console.log").open("ab") as console:
            child = childproc.start(
                [*self.program, record["command"], *words_of(flags)], cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=console, stderr=subprocess.STDOUT, start_new_session=True, creationflags=OWN_GROUP,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self._children[name] = child
        told = {"process": child.pid, "host": platform.node(), "planned_peak_bytes": found["plan"]["peak_bytes"]}
        try:
            self._write(name, {**record, "flags": flags, "why": "", "begun": time.time(), **told})
        except OSError:  # it would be started once more
            child.terminate()
            raise
        return name

    def count_ended(self) -> None:
        """Note how children ended, and let the system forget them."""
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is not None:
                del self._children[name]
                with self._lock:
                    record = self._launch(name)
                    if record.get("process") == child.pid:
                        self._write(name, {**record, "exit_code": code})

    def _launch(self, name: str) -> dict[str, Any]:
        return read_record(self.places.log_dir / name / LAUNCH_FILE)

    def _write(self, name: str, record: dict[str, Any]) -> None:
        write_text(self.places.logs(name) / LAUNCH_FILE, json.dumps(record, indent=1) + "\n")


def _waits(record: dict[str, Any]) -> bool:
    """Whether a launch is in the queue; one that somebody else has written is passed over."""
    is_whole = isinstance(record.get("flags"), dict) and isinstance(record.get("asked"), (int, float))
    known = record.get("command") in ("train", "dpo")
    return is_whole and known and record.get("process") is None and not record.get("refused")
