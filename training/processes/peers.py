"""What happens to the other processes of a run when one fails? They end within seconds, and one line says who and why.

A process that waits in a collective learns nothing of an exception elsewhere: gloo waits half an hour, NCCL ten minutes,
and both then blame the network. So each process has a thread that puts a counter into the launcher's store every second,
watches the counter of the next process (a ring: one look a second, at any number of processes), and reads one key that
the first failure is written to. With that the timeout of the process group may be long, and nobody who prepares data or
saves for an hour is taken for dead. Counters are compared by the watcher's own beats, not by the clock: a run that was
suspended as a whole continues.
Source: the store of torch.distributed (TCPStore); torchrun's agent hosts it, else process 0 does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, TextIO

import torch.distributed as dist

from leaving import INTERRUPTED
from screen import visible
from settings.errors import UserError
from training.processes.interrupts import SHOW_CURSOR
from training.report.endings import Interrupted
from training.report.log_files import log_crash

BEAT_SECONDS = 1.0
GONE_BEATS = 20  # of the watcher, without one of the watched
DIAGNOSIS_BEATS = 3  # after a broken connection: who is still there?
GRACE_SECONDS = 1.0  # for the own main thread to come to the same end and tell it better
FAREWELL_SECONDS = 10.0  # how long the host of the store stays for the others
BROKEN_CONNECTION = ("gloo", "nccl", "connection", "socket", "peer", "broken pipe")
LEFT = "left"


@dataclass(frozen=True)
class Failure:
    """The first failure of a run: of which process, why, with which exit code, and who tells the user (-1: nobody)."""

    rank: int
    reason: str
    exit_code: int
    teller: int


class PeerFailed(SystemExit):
    """Ends this process because another one failed; the user has been told."""


class Peers:
    """Ties the processes of a run together while the context is open; with one process it does nothing.

    Enter it as soon as the process group exists, and around everything else.

    Args:
        rank, num_processes: of this process.
        beat_seconds: time between two looks.
    Attributes:
        resume: the command that continues the run, once its name is known.
    """

    def __init__(self, rank: int, num_processes: int, beat_seconds: float = BEAT_SECONDS) -> None:
        self.resume = ""
        self.rank, self.num_processes, self.beat_seconds = rank, num_processes, beat_seconds
        self._store: Any = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Peers:
        if self.num_processes > 1:
            self._store = connect()
            self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is None:
            return
        if error is None or isinstance(error, Interrupted):  # all processes stop at the same step
            self._leave()
            return
        with suppress(ValueError, AttributeError):  # the launcher's SIGTERM must not cut the explanation short
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        failure = None if isinstance(error, UserError) else self._explanation(error)
        if failure is None:
            self._publish(self._own_failure(error))
            self._stop()
            return
        self._tell(failure)
        self._stop()
        raise PeerFailed(failure.exit_code) from error

    # --- the thread ---

    def _watch(self) -> None:
        beats = silent = lost = 0
        seen = b""
        neighbour = (self.rank + 1) % self.num_processes
        while not self._over.wait(self.beat_seconds):
            beats += 1
            try:
                self._store.set(f"beat/{self.rank}", str(beats))
                failure, lost = self._failure(), 0
                beat = self._beat(neighbour)
                silent, seen = (silent + 1, seen) if beat == seen else (0, beat)
                if failure is None and silent >= GONE_BEATS and beat != LEFT.encode():
                    failure = self._publish(self._gone([neighbour]))
            except RuntimeError:  # every error of the store is one
                lost += 1
                failure = self._store_lost() if lost > DIAGNOSIS_BEATS else None
            if failure is not None and failure.rank != self.rank:
                if not self._over.wait(GRACE_SECONDS):
                    self._tell(failure)
                    os._exit(failure.exit_code)
                return

    def _beat(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self._store.get(key) if self._store.check([key]) else b""

    # --- failures ---

    def _failure(self) -> Failure | None:
        if not self._store.check(["failure"]):
            return None
        return Failure(**json.loads(self._store.get("failure")))

    def _publish(self, failure: Failure) -> Failure:
        """Make it the failure of the run unless there is one; returns the one that counts."""
        with suppress(RuntimeError):
            return Failure(**json.loads(self._store.compare_set("failure", "", json.dumps(asdict(failure)))))
        return failure  # the store is gone

    def _own_failure(self, error: BaseException) -> Failure:
        """What this process says of itself. Process 0 tells its refusals by itself, and those of the others."""
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        who = f"process {self.rank} of {self.num_processes} on {socket.gethostname()}"
        text = "\n  ".join(error.problems) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        reason = f"{who} was interrupted" if code == INTERRUPTED else f"{who} failed: {text}"
        return Failure(self.rank, reason[:4000], code, 0 if self.rank else -1)

    def _explanation(self, error: BaseException) -> Failure | None:
        """The failure elsewhere that an error here comes from; None where the error is this process's own."""
        words = str(error).lower()
        if not isinstance(error, RuntimeError) or not any(sign in words for sign in BROKEN_CONNECTION):
            return None
        try:
            before = [self._beat(rank) for rank in range(self.num_processes)]
            for _ in range(DIAGNOSIS_BEATS):
                time.sleep(self.beat_seconds)
                failure = self._failure()
                if failure is not None:
                    return failure if failure.rank != self.rank else None
            after = [self._beat(rank) for rank in range(self.num_processes)]
            still = (LEFT.encode(),)
            gone = [r for r in range(self.num_processes) if after[r] == before[r] and after[r] not in still]
            gone = [rank for rank in gone if rank != self.rank]
            return self._publish(self._gone(gone)) if gone else None
        except RuntimeError:
            return self._store_lost()

    def _gone(self, ranks: list[int]) -> Failure:
        names = ", ".join(str(rank) for rank in ranks)
        reason = (
            f"process {names} of {self.num_processes} is gone without a word: killed, most likely for lack of memory "
            f"(the kernel's log says so), or its machine is gone; {self._way_on()}"
        )
        return Failure(ranks[0], reason, 1, self.rank)

    def _way_on(self) -> str:
        return f"continue with\n  {self.resume}" if self.resume else "start it again by the same command"

    def _store_lost(self) -> Failure:
        where = f"process 0 or the launcher of its machine is gone; {self._way_on()}"
        return Failure(0, f"process {self.rank} of {self.num_processes}: {where}", 1, self.rank)

    def _tell(self, failure: Failure) -> None:
        if failure.teller != self.rank:
            return
        text = f"stopped: {failure.reason}"
        stream: TextIO | None = sys.__stderr__
        if sys.__stdout__ is not None and sys.__stdout__.isatty():
            os.write(sys.__stdout__.fileno(), SHOW_CURSOR)  # a live display hides it
        if stream is not None:
            print(visible(text), file=stream, flush=True)
        log_crash(f"{text}\n")

    # --- the end ---

    def _leave(self) -> None:
        """Say goodbye, and where this process hosts the store, wait for the others."""
        self._stop()
        with suppress(RuntimeError):
            self._store.set(f"beat/{self.rank}", LEFT)
            count = self._store.add("number left", 1)
            deadline = time.monotonic() + FAREWELL_SECONDS
            while hosts_store(self.rank) and count < self.num_processes and time.monotonic() < deadline:
                time.sleep(0.02)
                count = self._store.add("number left", 0)
        self._store = None

    def _stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * self.beat_seconds)


def hosts_store(rank: int) -> bool:
    """Whether the store lives in this process rather than in torchrun's agent."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def connect() -> Any:
    """A connection of its own to the store that the processes met at; a restart that meets there again has its own keys."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start = [uuid.uuid4().hex]
    dist.broadcast_object_list(start, 0)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))  # type: ignore[attr-defined]
    return dist.PrefixStore(f"peers/{start[0]}", store)  # type: ignore[attr-defined]
