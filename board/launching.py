"""How does the page start a run that outlives it? As a child in a session of its own, and from a queue of files.

What is asked for is written to `logs/<run>/launch.json` first and started from there: a page that is closed or restarted
loses nothing, and whatever waits is seen by every browser. The oldest that waits is planned beside the runs that live;
where it does not fit it goes on waiting, and where it would not fit an empty machine it is refused with the reasons.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from board.places import Outside, Places, read_json
from board.planning import PROGRAM, Flags, Planner, still_to_take, words_of
from board.runs import ALIVE, LAUNCH_FILE, REQUEST_FILE, list_runs, run_facts, run_names
from config import UserError, load
from units import MIB

QUEUE_SECONDS = 2.0
DOES_NOT_FIT = 3
WISHES = ("save", "stop")


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

    def ask(self, name: str, command: str, flags: Flags) -> None:
        """Put a run into the queue.

        Raises:
            UserError: the settings are wrong. Outside: the name is none.
        """
        folder, saved = self.places.logs(name), self.places.saved(name)
        own = {"run_name": name, "log_dir": str(self.places.log_dir), "output_dir": str(self.places.output_dir)}
        flags = {**flags, **own}
        load(command, flags)
        is_resumed = str(flags.get("is_keep_training", "")).lower() in ("true", "1", "yes", "on")
        state = run_facts(self.places, name)["state"] if folder.exists() or saved.exists() else ""
        if is_resumed and not saved.exists():
            raise UserError(f"--run_name = {name}, has no checkpoint to go on from; start it anew under another name")
        if state in (*ALIVE, "waiting") or (saved.exists() and not is_resumed):
            raise UserError(f"--run_name = {name}, exists already; choose another name")
        folder.mkdir(parents=True, exist_ok=True)
        self._write(name, {"asked": time.time(), "command": command, "flags": flags, "process": None})

    def withdraw(self, name: str) -> None:
        """Take a run out of the queue."""
        if run_facts(self.places, name)["state"] == "waiting":
            (self.places.logs(name) / LAUNCH_FILE).unlink(missing_ok=True)
            with suppress(OSError):
                self.places.logs(name).rmdir()

    def wish(self, name: str, word: str) -> None:
        """Ask a run to `save` now, or to `stop` behind its step.

        Raises:
            Outside: the run or the word is unknown.
        """
        folder = self.places.logs(name)
        if word not in WISHES or not folder.is_dir():
            raise Outside(f"{word[:20]!r} cannot be asked of {name}")
        fresh = folder / f".tmp-{REQUEST_FILE}"
        fresh.write_text(word + "\n", encoding="utf8")
        os.replace(fresh, folder / REQUEST_FILE)

    async def work(self) -> None:
        """Look after children and queue until cancelled."""
        while True:
            try:
                self.count_ended()
                await self.start_next()
            except (OSError, UserError, asyncio.TimeoutError) as error:
                print(f"queue: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(QUEUE_SECONDS)

    async def start_next(self) -> str | None:
        """Start the oldest run that waits, if it fits now. Returns its name if it was started."""
        waiting = [(record["asked"], name, record) for name, record in self._launches() if _waits(record)]
        if not waiting:
            return None
        _, name, record = min(waiting, key=lambda entry: entry[0])
        runs = await asyncio.to_thread(list_runs, self.places)
        reserved = still_to_take(runs)
        found = await self.planner.plan(record["flags"], reserved, fresh_seconds=0.0)
        others = [run["name"] for run in runs if run["state"] in ALIVE]
        if "plan" not in found and (found["exit_code"] != DOES_NOT_FIT or not others):
            self._write(name, {**record, "refused": "\n".join(found["problems"])})
        elif not found["fits_now"] if "plan" in found else True:
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
            child = subprocess.Popen(
                [*self.program, record["command"], *words_of(flags)], cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self._children[name] = child
        told = {"process": child.pid, "host": platform.node(), "planned_peak_bytes": found["plan"]["peak_bytes"]}
        self._write(name, {**record, "flags": flags, "why": "", **told})
        return name

    def count_ended(self) -> None:
        """Note how children ended, and let the system forget them."""
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is not None:
                del self._children[name]
                record = read_json(self.places.log_dir / name / LAUNCH_FILE)
                if record.get("process") == child.pid:
                    self._write(name, {**record, "exit_code": code})

    def _launches(self) -> list[tuple[str, dict[str, Any]]]:
        return [(name, read_json(self.places.log_dir / name / LAUNCH_FILE)) for name in run_names(self.places)]

    def _write(self, name: str, record: dict[str, Any]) -> None:
        path = self.places.logs(name) / LAUNCH_FILE
        fresh = path.with_name(f".tmp-{LAUNCH_FILE}")
        fresh.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf8")
        os.replace(fresh, path)


def _waits(record: dict[str, Any]) -> bool:
    """Whether a launch is in the queue; one that somebody else has written is passed over."""
    is_whole = isinstance(record.get("flags"), dict) and isinstance(record.get("asked"), (int, float))
    known = record.get("command") in ("train", "dpo")
    return is_whole and known and record.get("process") is None and not record.get("refused")
