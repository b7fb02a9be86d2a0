"""This process's exact peak of memory between two points in time.

Samples miss what lives between them; the kernel does not. Linux keeps the high water mark of resident memory and starts
it anew where it is asked to; what is mapped from files is taken off. Elsewhere the mark cannot be started anew, so a
later figure is at least the earlier ones.
Source: proc_pid_status(5), VmHWM; proc_pid_clear_refs(5), value 5; getrusage(2).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from memory.observe.processes import has_proc, process_usage

PROCESS = Path("/proc/self")
RESET = "5"


def restart() -> None:
    """Let the mark begin anew, where the system can."""
    with suppress(OSError):
        (PROCESS / "clear_refs").write_text(RESET)


def peak_bytes() -> int:
    """The most anonymous memory of this process since `restart`, in bytes."""
    if not has_proc():
        return _lifetime_peak()
    marks = read_marks()
    # File pages only grow while code and data are touched: those of now are at least those of the peak.
    return max(marks.highest_bytes - marks.file_bytes, marks.anon_bytes)


class Marks(NamedTuple):
    """Resident memory of this process in bytes: its high water mark, and what is anonymous and mapped from files now."""

    highest_bytes: int
    anon_bytes: int
    file_bytes: int


def read_marks() -> Marks:
    """Read them from /proc."""
    status = (PROCESS / "status").read_text()
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in status.splitlines())}
    kib = {name: int(fields[name][0]) for name in ("VmHWM", "RssFile", "RssAnon", "RssShmem")}
    return Marks(1024 * kib["VmHWM"], 1024 * (kib["RssAnon"] + kib["RssShmem"]), 1024 * kib["RssFile"])


def _lifetime_peak() -> int:
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    usage = process_usage(os.getpid())
    mapped = usage.file_bytes if usage else 0
    unit = 1 if sys.platform == "darwin" else 1024
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - mapped)
