"""Memory of a process and its children, anonymous and file-backed apart.

File-backed pages (mapped data and libraries) can be dropped by the kernel at any time; anonymous ones cannot, so they
are what a budget is about. Linux reports both in /proc/PID/status; elsewhere psutil is asked. Shared memory (tensors
handed between processes) cannot be dropped either, but is the same memory in each process: of a tree, the largest share
counts once. Pages that a forked child still shares with its parent count in both.
Source: proc_pid_status(5), RssAnon, RssFile, RssShmem, VmHWM.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil

ROOT = Path("/")
LISTING_SECONDS = 0.5  # Children are listed at most this often.
LISTING_SHARE = 0.001  # Listing takes at most this share of the time.
SETTLED_SECONDS = 0.05  # A child just forked by vfork or posix_spawn still shows the memory of its parent.


@dataclass(frozen=True)
class Usage:
    """Memory of one process or of a tree, in bytes.

    Args:
        anon_bytes: what the kernel cannot drop: heap, stacks, tensors, shared memory.
        file_bytes: what it can drop: mapped files.
        peak_bytes: of a tree: the anonymous memory of its first process at a new high since the last look at it; 0: no
            new high.
    """

    anon_bytes: int
    file_bytes: int
    peak_bytes: int = 0


def text_of(path: Path) -> str:
    """The text of a file of the system; "" where it cannot be read."""
    try:
        with open(path, encoding="utf8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def sizes_of(path: Path) -> Counter[str]:
    """The sizes that a file of the system lists as `name: number kB`, in bytes; 0 for a name that it does not list."""
    lines = re.findall(r"^(?:Node \d+ )?(\S+):\s+(\d+) kB", text_of(path), re.MULTILINE)
    return Counter({name: int(kib) * 1024 for name, kib in lines})


@cache
def has_proc(root: Path = ROOT) -> bool:
    """Whether /proc reports anonymous and file-backed memory apart, as Linux does from 4.5 on."""
    return "RssAnon" in sizes_of(root / "proc/self/status")


def usage_of(pids: list[int], root: Path = ROOT) -> Usage:
    """Memory of several processes together; those that have ended hold nothing."""
    return _usage([_resident(pid, root) for pid in pids])


def _usage(processes: list[Counter[str]]) -> Usage:
    anonymous = sum(sizes["RssAnon"] for sizes in processes)
    shared = max(sizes["RssShmem"] for sizes in processes)
    return Usage(anonymous + shared, sum(sizes["RssFile"] for sizes in processes))


def _resident(pid: int, root: Path) -> Counter[str]:
    if has_proc(root):
        return sizes_of(root / f"proc/{pid}/status")
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return Counter()
    # Windows reports private memory; macOS only what is resident, which then counts as anonymous.
    anonymous = getattr(memory, "private", memory.rss - getattr(memory, "shared", 0))
    return Counter(RssAnon=anonymous, RssFile=max(0, memory.rss - anonymous))


def tree_pids(pid: int, root: Path = ROOT) -> list[int]:
    """A process and all its descendants, the process first."""
    pids = [pid]
    if not (root / f"proc/{pid}/task/{pid}/children").exists():  # A Linux may lack it too (CONFIG_PROC_CHILDREN).
        with suppress(psutil.Error):
            pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return pids
    for parent in pids:  # The list grows while it is walked.
        folder = root / f"proc/{parent}/task"
        with suppress(OSError):  # The process has ended.
            for thread in os.listdir(folder):
                children = map(int, text_of(folder / thread / "children").split())
                pids += [child for child in children if child not in pids]
    return pids


class ProcessTree:
    """The memory of a process and its descendants, cheap enough to be asked several times a second.

    Args:
        pid: its root; the own process by default.
        root: the folder that holds /proc.
    """

    def __init__(self, pid: int | None = None, root: Path = ROOT) -> None:
        self.pid = os.getpid() if pid is None else pid
        self.root = root
        self._last = _resident(self.pid, root)
        self._first_listed: dict[int, float] = {}  # Process IDs are its keys.
        self._next_listing = 0.0

    def usage(self) -> Usage:
        """Memory now. A new child counts from the first call that comes a moment after the one that listed it."""
        now = time.monotonic()
        if now >= self._next_listing:
            start = time.thread_time()
            children = tree_pids(self.pid, self.root)[1:]
            self._first_listed = {pid: self._first_listed.get(pid, now) for pid in children}
            self._next_listing = now + max(LISTING_SECONDS, (time.thread_time() - start) / LISTING_SHARE)
        settled = [pid for pid, listed in self._first_listed.items() if now - listed >= SETTLED_SECONDS]
        processes = [_resident(pid, self.root) for pid in (self.pid, *settled)]
        usage = _usage(processes)
        before = self._last
        self._last = processes[0]
        if self._last["VmHWM"] > before["VmHWM"]:
            mapped = max(before["RssFile"], self._last["RssFile"])  # A file may have been unmapped after the peak.
            usage = replace(usage, peak_bytes=self._last["VmHWM"] - mapped)
        return usage
