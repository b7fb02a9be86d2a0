"""A process under a hard memory limit: a control group of its own, version 1 or 2, whichever can be written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class HardLimit:
    """A group with a limit; a process that overruns it is killed. Used as a context manager.

    Args:
        limit_bytes: of anonymous memory and file pages together; the kernel drops file pages first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.is_v1 = (V1 / "memory.limit_in_bytes").is_file()
        self.folder = (V1 if self.is_v1 else V2) / f"frugal_{os.getpid()}"

    @staticmethod
    def why_not() -> str:
        """Why no group can be made here; empty where one can."""
        try:
            with HardLimit(1 << 40):
                return ""
        except OSError as error:
            return f"no memory control group can be made here ({error})"

    def __enter__(self) -> HardLimit:
        self.folder.mkdir(exist_ok=True)
        try:
            name = "memory.limit_in_bytes" if self.is_v1 else "memory.max"
            (self.folder / name).write_text(str(self.limit_bytes))
        except OSError:
            self.folder.rmdir()
            raise
        with suppress(OSError):  # swap would turn a kill into a crawl
            (self.folder / ("memory.swappiness" if self.is_v1 else "memory.swap.max")).write_text("0")
        return self

    def enter(self) -> None:
        """Put the calling process into the group: for a child, before it becomes another program."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self.folder.rmdir()
