"""A run's sign of life, and what is wished of it from outside: two small files in its log folder, for pages and scripts.

`heartbeat.json` is written anew every two seconds by a thread of its own, so that a step of a minute is no silence, and
once more at the end with how the run ended. `request` holds a word that somebody else wrote: `stop` ends the run behind
its step, saved, and `save` has it write a checkpoint. It is looked for once a step, which costs one failed `open`.
A run that still prepares its rows, or plans, beats too (`Beginning`); of one that is refused then, nothing is left. There
`stop` is looked for at each beat, and ends the run as Ctrl-C does; `save` waits for the first step.
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

from run_files import HEARTBEAT_FILE, REQUEST_FILE, read_record
from settings.errors import UserError
from storage import write_text
from training.report.endings import SAVE, STOP, Interrupted

PREPARING_FILE = ".preparing"
SECONDS = 2.0
STARTING, RUNNING, DONE, STOPPED, FAILED = "starting", "running", "done", "stopped", "failed"


class Heartbeat:
    """The sign of life of one run; a context that ends it with how the run ended.

    Args:
        folder: of the run's logs, which is there. facts: what is told beside process and time, called at each beat.
        is_main: other processes write nothing and are asked nothing.
    """

    def __init__(self, folder: Path, facts: Callable[[], dict[str, Any]], is_main: bool = True) -> None:
        self._folder, self._facts, self._is_main = folder, facts, is_main
        self._started, self._ended = time.time(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Heartbeat:
        if self._is_main:
            self._start(RUNNING)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        if self._stop():
            self._beat(*_ending(error))

    def wish(self) -> str:
        """What was asked for since the last call: STOP, SAVE, or nothing."""
        return self._take(STOP, SAVE) if self._is_main else ""

    def _take(self, *heard: str) -> str:
        """The wish that lies there, if it is one of these; another wish is left there, words that are none are removed."""
        try:
            with open(self._folder / REQUEST_FILE, encoding="utf8", errors="replace") as file:
                word = file.read(20).strip()
            if word in heard or word not in (STOP, SAVE):
                os.unlink(self._folder / REQUEST_FILE)
        except OSError:
            return ""
        return word if word in heard else ""

    def _start(self, state: str) -> None:
        self._beat(state)
        self._thread = threading.Thread(target=self._go_on, args=(state,), name="heartbeat", daemon=True)
        self._thread.start()

    def _stop(self) -> bool:
        """Let no further beat come; whether there were any."""
        if self._thread is None:
            return False
        self._ended.set()
        self._thread.join()
        self._thread = None
        return True

    def _go_on(self, state: str) -> None:
        while not self._ended.wait(SECONDS):
            self._beat(state)

    def _beat(self, state: str, reason: str = "") -> None:
        record = {
            "state": state, "reason": reason, "process": os.getpid(), "host": platform.node(),
            "started": self._started, "time": time.time(), **self._facts(),
        }  # fmt: skip
        with suppress(OSError):  # a disk that is full for a moment; the next one is soon
            write_text(self._folder / HEARTBEAT_FILE, json.dumps(record) + "\n", is_synced=False)


class Beginning(Heartbeat):
    """The sign of life of a run that prepares and plans, from `begin` until `leave`, or the end of the context.

    Unless it was left, its end takes the sign away, as nothing is written for a run that is refused; where an earlier part
    of the run had one, that is there again.

    Args:
        stop: lets the main thread end, where somebody has asked the run to stop; of one in another thread the wish waits
            for its first step.
    """

    def __init__(self, stop: Callable[[], object]) -> None:
        super().__init__(Path(), dict)
        self._end_run, self._may_end = stop, False
        self._before: bytes | None = None
        self._made: list[Path] = []

    def __enter__(self) -> Beginning:
        return self

    def begin(self, folder: Path, facts: Callable[[], dict[str, Any]]) -> None:
        """Give signs from now on.

        Args:
            folder: of the run's logs; made if missing. What PREPARING_FILE in it says is told as `doing`.
        """
        self._folder = folder
        self._facts = lambda: {**facts(), "doing": read_record(folder / PREPARING_FILE) or None}
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        self._may_end = threading.current_thread() is threading.main_thread()
        with suppress(OSError):  # what cannot be written is told where it is needed
            folder.mkdir(parents=True, exist_ok=True)
            (folder / REQUEST_FILE).unlink(missing_ok=True)  # what was wished of an earlier part of the run
            with suppress(FileNotFoundError):
                self._before = (folder / HEARTBEAT_FILE).read_bytes()
            self._start(STARTING)

    def leave(self) -> None:
        """Let the run's own heartbeat go on."""
        if self._stop():
            (self._folder / PREPARING_FILE).unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        if not self._stop():
            return
        with suppress(OSError):
            for name in (PREPARING_FILE, REQUEST_FILE):
                (self._folder / name).unlink(missing_ok=True)
            if self._before is None:
                (self._folder / HEARTBEAT_FILE).unlink(missing_ok=True)
                for folder in self._made:
                    folder.rmdir()  # unless there is more in it
            else:
                (self._folder / HEARTBEAT_FILE).write_bytes(self._before)

    def _beat(self, state: str, reason: str = "") -> None:
        super()._beat(state, reason)
        if self._may_end and self._take(STOP):
            self._end_run()


def _ending(error: BaseException | None) -> tuple[str, str]:
    """State and reason of the last beat."""
    if error is None:
        return DONE, ""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return STOPPED, str(error)
    if isinstance(error, UserError):
        return FAILED, "\n".join(error.problems)
    return FAILED, f"{type(error).__name__}: {error}"[:500]
