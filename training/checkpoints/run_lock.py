"""The right to write a run: one process group at a time, since two would mix their checkpoints.

The main process holds a lock of the operating system on `<output_dir>/.<run_name>.lock`, which is free again when that
process is gone, however it went. `owner.json` in the run's folder says for people whose it is.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from settings.errors import reason_of
from support.language import say
from support.storage import NO_LOCKS, lock_at, write_text
from training.report.run_files import OWNER_FILE, read_record
from training.report.wording import duration


class RunLock:
    """The lock of one run, released at the end of its context. `warning`: that it protects nothing here, or None."""

    def __init__(self) -> None:
        self.warning: str | None = None
        self._lock: FileLock | None = None
        self._run_dir: Path | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self, run_dir: Path) -> list[str]:
        """Lock the run of a folder, which need not be there yet; that of another folder is released.

        Returns:
            why that cannot be, as `UserError` takes it; empty: it is ours.
        """
        if self._run_dir == run_dir:
            return []
        self.release()
        self.warning = None
        lock: FileLock | None = None
        try:
            real = run_dir.resolve()  # By whatever name or link it is called, it is one run.
            real.parent.mkdir(parents=True, exist_ok=True)
            lock = lock_at(real.with_name(f".{real.name}.lock"))
            if lock is not None:
                lock.acquire(timeout=0)
        except Timeout:
            owner = read_record(run_dir / OWNER_FILE)
            who = say("another process")
            started = owner.get("started")
            if type(started) is float:
                who = say(
                    "process {number} on {host}, since {time},",
                    number=owner.get("process"),
                    host=str(owner.get("host"))[:80],
                    time=duration(max(0.0, time.time() - started)),
                )
            text = "--run_name = {name}, is in use: {who} trains it; wait for its end, stop it, or choose another run"
            return [say(text, name=run_dir.name, who=who)]
        except OSError as error:
            if error.errno not in NO_LOCKS:
                text = "--output_dir = {parent}, cannot be written: {reason}; choose another folder"
                return [say(text, parent=run_dir.parent, reason=reason_of(error))]
            lock = None
        if lock is None:
            self.warning = say(
                "--output_dir = {parent}, is on a file system without locks: a second process that trains {name} "
                "would not be noticed, and mix its checkpoints; see that there is none",
                parent=run_dir.parent,
                name=run_dir.name,
            )
        self._lock = lock
        self._run_dir = run_dir
        return []

    def write_owner(self) -> None:
        """Say in the run's folder whose it is; raises OSError."""
        assert self._run_dir is not None
        record = {"process": os.getpid(), "host": platform.node(), "started": time.time()}
        write_text(self._run_dir / OWNER_FILE, json.dumps(record) + "\n")

    def release(self) -> None:
        """Let others have the run."""
        if self._run_dir is not None:
            with suppress(OSError):  # Without the lock it says nothing.
                (self._run_dir / OWNER_FILE).unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()
        self._lock = None
        self._run_dir = None
