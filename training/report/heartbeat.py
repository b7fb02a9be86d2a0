"""Is a run alive, and what is wished of it from outside? Two small files in its log folder, for pages and scripts.

`heartbeat.json` is written anew every two seconds by a thread of its own, so that a step of a minute is no silence, and
once more at the end with how the run ended. `request` holds a word that somebody else wrote: `stop` ends the run behind
its step, saved, and `save` has it write a checkpoint. It is looked for once a step, which costs one failed `open`.
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

from settings.fields import UserError
from training.report.endings import SAVE, STOP, Interrupted

HEARTBEAT_FILE, REQUEST_FILE = "heartbeat.json", "request"
SECONDS = 2.0
RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"


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
            with suppress(OSError):
                (self._folder / REQUEST_FILE).unlink(missing_ok=True)  # what was wished of an earlier part of the run
            self._beat(RUNNING)
            self._thread = threading.Thread(target=self._go_on, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self._beat(*_ending(error))

    def wish(self) -> str:
        """What was asked for since the last call: STOP, SAVE, or nothing."""
        if not self._is_main:
            return ""
        try:
            with open(self._folder / REQUEST_FILE, encoding="utf8") as file:
                word = file.read(20).strip()
            os.unlink(self._folder / REQUEST_FILE)
        except (OSError, UnicodeDecodeError):
            return ""
        return word if word in (STOP, SAVE) else ""

    def _go_on(self) -> None:
        while not self._ended.wait(SECONDS):
            self._beat(RUNNING)

    def _beat(self, state: str, reason: str = "") -> None:
        record = {
            "state": state, "reason": reason, "process": os.getpid(), "host": platform.node(),
            "started": self._started, "time": time.time(), **self._facts(),
        }  # fmt: skip
        fresh = self._folder / f".tmp-{HEARTBEAT_FILE}"
        with suppress(OSError):  # a disk that is full for a moment; the next one is soon
            fresh.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf8")
            os.replace(fresh, self._folder / HEARTBEAT_FILE)


def _ending(error: BaseException | None) -> tuple[str, str]:
    """State and reason of the last beat."""
    if error is None:
        return DONE, ""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return STOPPED, str(error)
    if isinstance(error, UserError):
        return FAILED, "\n".join(error.problems)
    return FAILED, f"{type(error).__name__}: {error}"[:500]
