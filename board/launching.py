"""Runs that outlive the page: child processes in sessions of their own, started from a queue of files.

Each run that is requested is first written to `logs/<run>/launch.json` and started from there, so that a page that is
closed or restarted loses nothing and every browser sees the queue. The oldest run in the queue is planned for the
memory that the active runs leave. If it does not fit, it waits; if it would not fit even without them, it is refused
with the reasons.
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

from board.planning import PROGRAM, Flags, Planner, goes_on, still_to_take, words_of
from board.reader import Folders, Outside, checked_name, is_run_name
from board.runs import ALIVE, CONSOLE_FILE, delete_run, end_of_file, list_runs, run_facts
from settings.errors import UserError
from settings.loading import load
from support import child_process
from support.language import say
from support.storage import write_text
from support.units import MIB
from training.report.run_files import LAUNCH_FILE, REQUEST_FILE, Record, number_of, read_record

QUEUE_SECONDS = 2.0
# How long a run that does not fit waits while no other run is active. Memory may still come free: the page unloads a
# model after ten minutes without a question, and a run that has just ended returns its memory a moment later.
PATIENCE_SECONDS = 660.0
LOOK_AGAIN_SECONDS = 30.0  # A plan takes a second of processor time, which active runs need.
DOES_NOT_FIT = 3
# On Windows a process group stands for a session: Ctrl-C on the page's terminal must not reach its runs.
OWN_GROUP = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
SAVE = "save"
STOP = "stop"
COMMANDS = ("train", "dpo")


@dataclass
class Launcher:
    """Keeps the queue, starts runs from it, and passes requests to save or stop on to them.

    Args:
        folder: the folder that relative paths in the settings of runs start from.
    """

    folders: Folders
    planner: Planner
    folder: Path
    program: tuple[str, ...] = PROGRAM
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    # When a run of the queue was last planned, and what it depended on: the run, and the active runs.
    _last_plan: tuple[float, object] = (-math.inf, None)
    # The next run if it does not fit -> since when no other run has been active.
    _waiting_since: dict[str, float] = field(default_factory=dict)
    # Held from reading a run's files until the decision is written, since requests come from several threads.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def enqueue(self, name: str, command: str, flags: Flags) -> None:
        """Put a run into the queue.

        Raises:
            UserError: the settings are wrong, or the name is taken. Outside: it is not a valid name.
        """
        flags = {
            **flags,
            "run_name": checked_name(name),
            "log_dir": str(self.folders.log_dir),
            "output_dir": str(self.folders.output_dir),
        }
        load(command, flags)
        with self._lock:
            self._reserve_name(name, goes_on(flags))
            self._write(name, {"asked": time.time(), "command": command, "flags": flags, "process": None})

    def enqueue_under_free_name(self, stem: str, command: str, flags: Flags) -> str:
        """Put a run into the queue under the first of `stem`, `stem_2`, `stem_3` ... that is free. Returns its name.

        Raises:
            UserError, Outside: see `enqueue`.
        """
        with self._lock:
            name = stem
            for number in count(2):
                if not self._is_there(name):
                    break
                name = f"{stem}_{number}"
            self.enqueue(name, command, flags)
            return name

    def _is_there(self, name: str) -> bool:
        return self.folders.logs(name).exists() or self.folders.saved(name).exists()

    def _reserve_name(self, name: str, is_resumed: bool) -> None:
        """Make the log folder of a run. For a new run the folder must not exist, so that of two pages only one gets the
        name.

        Raises:
            UserError: the name is taken, or there is no run to resume.
        """
        is_there = self._is_there(name)
        is_saved = self.folders.saved(name).exists()
        error = UserError(say("--run_name = {run}, exists already; choose another name", run=name))
        if is_resumed and not is_saved:
            raise UserError(
                say(
                    "--run_name = {run}, has no checkpoint to resume from; start a new run under another name", run=name
                )
            )
        is_used = is_there and run_facts(self.folders, name)["state"] in (*ALIVE, "waiting")
        if is_used or (is_saved and not is_resumed):
            raise error
        try:
            self.folders.logs(name).mkdir(parents=True, exist_ok=is_there)
        except FileExistsError:
            raise error from None

    def withdraw(self, name: str) -> None:
        """Take a run out of the queue."""
        with self._lock:
            if run_facts(self.folders, name)["state"] == "waiting":
                (self.folders.logs(name) / LAUNCH_FILE).unlink(missing_ok=True)
                with suppress(OSError):
                    self.folders.logs(name).rmdir()

    def delete(self, name: str) -> str:
        """Remove a run with all that it has written; see `delete_run`."""
        with self._lock:
            return delete_run(self.folders, name)

    def request(self, name: str, word: str) -> None:
        """Ask a run to `save` now, or to `stop` after its current step.

        Raises:
            Outside: the run or the word is unknown.
        """
        logs = self.folders.logs(name)
        if word not in (SAVE, STOP) or not logs.is_dir():
            raise Outside(say("{word!r} is not a request that {name} accepts", word=word[:20], name=name))
        with self._lock:
            if end_of_file(logs / REQUEST_FILE, 20) != STOP:  # A stop saves as well.
                write_text(logs / REQUEST_FILE, word + "\n")

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
        queue = self._queue()
        if not queue:
            return None
        runs = await asyncio.to_thread(list_runs, self.folders)
        active = [run["name"] for run in runs if run["state"] in ALIVE]
        # A run that was started elsewhere is active, whatever its launch says.
        waiting = [run["name"] for run in runs if run["state"] == "waiting" and run["name"] in queue]
        if not waiting:
            return None
        name = min(waiting, key=lambda name: queue[name]["asked"])
        situation = [name, queue[name]["asked"], active]
        if self._last_plan[1] == situation and time.monotonic() - self._last_plan[0] < LOOK_AGAIN_SECONDS:
            return None
        try:
            plan = await self.planner.plan(queue[name]["flags"], still_to_take(runs), fresh_seconds=0.0)
        finally:
            self._last_plan = (time.monotonic(), situation)
        return await asyncio.to_thread(self._follow, name, queue[name], plan, active)

    def _queue(self) -> dict[str, Record]:
        """The launches that wait, by the names of their runs; files that are no launch of the page are skipped."""
        names = [path.parent.name for path in self.folders.log_dir.glob(f"*/{LAUNCH_FILE}")]
        launches = {name: self._launch(name) for name in names if is_run_name(name)}
        return {name: launch for name, launch in launches.items() if _waits(launch)}

    def _follow(self, name: str, launch: Record, plan: Record, active: list[str]) -> str | None:
        """Start, keep waiting or refuse a run, by its plan. Returns its name if it was started.

        Args:
            launch: the launch that was planned. Nothing is done if the file has another one by now: the run was
                withdrawn, deleted or requested again.
            active: names of the active runs.
        """
        now = time.time()
        is_short = plan.get("exit_code") == DOES_NOT_FIT
        since = now if active else self._waiting_since.get(name, now)
        self._waiting_since = {name: since} if is_short else {}
        is_hopeless = not active and now - since >= PATIENCE_SECONDS
        with self._lock:
            if self._launch(name) != launch:
                return None
            if plan["fits_now"]:
                self._start(name, launch, plan)
                return name
            if "plan" in plan or (is_short and not is_hopeless):
                self._write(name, {**launch, "why": ", ".join(active)})
            else:
                self._write(name, {**launch, "refused": "\n".join(plan["problems"])})
        return None

    def _start(self, name: str, launch: Record, plan: Record) -> None:
        flags = dict(launch["flags"])
        if plan["reserved_bytes"]:
            flags["memory_budget"] = f"{int(plan['plan']['budget_bytes']) // MIB}M"
        with (self.folders.logs(name) / CONSOLE_FILE).open("ab") as console:
            child = child_process.start(
                [*self.program, launch["command"], *words_of(flags)],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                creationflags=OWN_GROUP,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self._children[name] = child
        started = {
            "flags": flags,
            "why": "",
            "begun": time.time(),
            "process": child.pid,
            "host": platform.node(),
            "planned_peak_bytes": plan["plan"]["peak_bytes"],
        }
        try:
            self._write(name, {**launch, **started})
        except OSError:  # Without its file the queue would start the run once more.
            child.terminate()
            raise

    def count_ended(self) -> None:
        """Write down the exit codes of children that have ended; `poll` lets the system forget them."""
        ended = {name: child for name, child in self._children.items() if child.poll() is not None}
        for name, child in ended.items():
            del self._children[name]
            with self._lock:
                launch = self._launch(name)
                if launch.get("process") == child.pid:
                    self._write(name, {**launch, "exit_code": child.returncode})

    def _launch(self, name: str) -> Record:
        return read_record(self.folders.log_dir / name / LAUNCH_FILE)

    def _write(self, name: str, launch: Record) -> None:
        write_text(self.folders.logs(name) / LAUNCH_FILE, json.dumps(launch, indent=1) + "\n")


def _waits(launch: Record) -> bool:
    if launch.get("process") is not None or launch.get("refused"):
        return False
    is_whole = isinstance(launch.get("flags"), dict) and number_of(launch.get("asked")) is not None
    return is_whole and launch.get("command") in COMMANDS
