"""Machines that are lost without a word, by power or cable: the system takes a quarter of an hour to break their connections.

Each process counts in the launcher's store once a second, and watches the count of the next process: a ring, one look a second at
any number of processes. Counts are compared by the watcher's own, not by the clock: a run that was suspended as a whole goes on.
Source: the store of torch.distributed (TCPStore); torchrun's agent hosts it, else process 0 does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from screen import visible

BEAT_SECONDS = 1.0
SILENT_BEATS = 20  # of the watcher, without one of the watched
LOST_BEATS = 3  # without an answer of the store
LEFT = b"left"


class Liveness:
    """Ends this process, exit code 1, where the next one gives no sign of life; `leave` ends the watch.

    Args:
        rank, size: of the run. name: the same for all processes, and for no other start that meets at the same store.
        message: what is then said on standard error.
    """

    def __init__(self, rank: int, size: int, name: str, message: Callable[[], str]) -> None:
        self._rank, self._next, self._message = rank, (rank + 1) % size, message
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))  # type: ignore[attr-defined]
        self._store: Any = dist.PrefixStore(f"beats/{name}", store)  # type: ignore[attr-defined]
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Say that this process ends."""
        self._has_left.set()
        self._thread.join(2 * BEAT_SECONDS)
        with suppress(RuntimeError):
            self._store.set(f"{self._rank}", LEFT)

    def _watch(self) -> None:
        own = silent = lost = 0
        seen = b""
        while not self._has_left.wait(BEAT_SECONDS):
            own += 1
            try:
                self._store.set(f"{self._rank}", str(own))
                count = self._store.get(f"{self._next}") if self._store.check([f"{self._next}"]) else b""
                silent, seen, lost = silent + 1 if count == seen else 0, count, 0
            except RuntimeError:  # every error of the store is one
                lost += 1
            if lost > LOST_BEATS or (silent >= SILENT_BEATS and seen != LEFT):
                with suppress(OSError, ValueError):
                    print(visible(self._message()), file=sys.__stderr__, flush=True)
                os._exit(1)
