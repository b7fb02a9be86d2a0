"""A run's sign of life, and what is requested of it from outside: two small files in its log folder, for pages and
scripts.

`heartbeat.json` is written anew every two seconds by a thread of its own, so that a step of a minute is no silence, and
once more at the end with how the run ended. `request` holds a word that somebody else wrote: `stop` ends the run behind
its step, saved, and `save` has it write a checkpoint. It is looked for once a step, which costs one failed `open`.
A run that still prepares its rows, or plans, beats too; of one that is refused then, before its folder is made, nothing
is left. There `stop` is looked for at each beat, and ends the run as Ctrl-C does; `save` waits for the first step.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from settings.errors import UserError, reason_of
from support.language import join
from support.storage import write_text
from training.report.endings import SAVE, STOP
from training.report.run_files import HEARTBEAT_FILE, REQUEST_FILE, read_record

PREPARING_FILE = ".preparing"
SECONDS = 2.0
STARTING = "starting"
RUNNING = "running"
Facts = Callable[[], dict[str, Any]]


class Heartbeat:
    """The sign of life of one run: silent until `begin` or `run`. A context that ends it with how the run ended; of a
    run that only began it takes the sign away (unless `keep` was called), and where an earlier part of the run had one,
    that is there again.

    Args:
        stop: ends the main thread, where somebody has asked a run to stop before its first step; of one in another
            thread the request waits for that step.
    """

    def __init__(self, stop: Callable[[], object] = lambda: None) -> None:
        self._stop = stop
        self._can_stop = False
        self._is_lasting = False
        self._folder = Path()
        self._state = ""
        self._facts: Facts = dict
        self._started = time.time()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._earlier_sign: bytes | None = None
        self._new_folders: list[Path] = []

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            (self._folder / PREPARING_FILE).unlink(missing_ok=True)
        if self._state == STARTING and not self._is_lasting:
            self._withdraw()
        elif error is None:
            self._beat("done")
        else:
            self._beat("stopped" if isinstance(error, KeyboardInterrupt) else "failed", reason_of_end(error))

    def begin(self, folder: Path, facts: Facts) -> None:
        """Give signs of a run that prepares.

        Args:
            folder: of the run's logs; made if missing. What PREPARING_FILE in it says is shown as `doing`.
            facts: what stands beside process and time, called at each beat.
        """
        self._new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        self._can_stop = threading.current_thread() is threading.main_thread()
        with suppress(OSError):  # A folder that cannot be written is refused where the run needs it.
            folder.mkdir(parents=True, exist_ok=True)
            # A request may be left from an earlier part of the run.
            (folder / REQUEST_FILE).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                self._earlier_sign = (folder / HEARTBEAT_FILE).read_bytes()
            self._go_on(STARTING, folder, lambda: {**facts(), "doing": read_record(folder / PREPARING_FILE) or None})

    def keep(self) -> None:
        """The run's files are there: how it ends is kept from now on, even before its first step."""
        self._is_lasting = True

    def run(self, folder: Path, facts: Facts) -> None:
        """Give signs of a run whose steps begin. Args as of `begin`; the folder is there."""
        (folder / PREPARING_FILE).unlink(missing_ok=True)
        self._go_on(RUNNING, folder, facts)

    def poll_request(self) -> str:
        """What was asked for since the last call: STOP, SAVE, or nothing, as in all processes that give no sign."""
        return self._take_request(STOP, SAVE) if self._state == RUNNING else ""

    def _go_on(self, state: str, folder: Path, facts: Facts) -> None:
        self._state = state
        self._folder = folder
        self._facts = facts
        self._beat(state)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(SECONDS):
            self._beat(self._state)
            if self._state == STARTING and self._can_stop and self._take_request(STOP):
                self._stop()

    def _take_request(self, *accepted: str) -> str:
        """Remove and return the request, if it is an accepted one. One for later is left, any other word removed."""
        path = self._folder / REQUEST_FILE
        try:
            with path.open(encoding="utf8", errors="replace") as file:
                word = file.read(20).strip()
            if word in accepted or word not in (STOP, SAVE):
                path.unlink()
        except OSError:
            return ""
        return word if word in accepted else ""

    def _beat(self, state: str, reason: str = "") -> None:
        record = {
            "state": state,
            "reason": str(reason),
            "process": os.getpid(),
            "host": platform.node(),
            "started": self._started,
            "time": time.time(),
            **self._facts(),
        }
        with suppress(OSError), self._lock:  # A disk may be full for a moment; the next beat is soon.
            write_text(self._folder / HEARTBEAT_FILE, json.dumps(record) + "\n", is_synced=False)

    def _withdraw(self) -> None:
        sign = self._folder / HEARTBEAT_FILE
        with suppress(OSError):
            (self._folder / REQUEST_FILE).unlink(missing_ok=True)
            if self._earlier_sign is not None:
                sign.write_bytes(self._earlier_sign)
                return
            sign.unlink(missing_ok=True)
            for folder in self._new_folders:
                folder.rmdir()  # It stays where there is more in it.


def reason_of_end(error: BaseException) -> str:
    """Why a run has ended, as its files say it: the problems of a refusal, a line each, or the error and its kind."""
    if isinstance(error, UserError):
        return join("\n", error.problems)
    if isinstance(error, KeyboardInterrupt):
        return reason_of(error) or "interrupted"
    return f"{type(error).__name__}: {error}"[:500]
