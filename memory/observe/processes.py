"""Memory of a process and its children, anonymous and file-backed apart.

Idea: file-backed pages (mapped data and libraries) can be dropped by the kernel at any time; anonymous ones cannot, so
they are what a budget is about. Linux tells both in /proc/PID/status for a few microseconds; elsewhere psutil is asked.
Shared memory (tensors handed between processes) cannot be dropped either, but it is the same memory in each process:
of a tree, the largest share counts once. Pages that a forked child still shares with its parent count in both.
Source: proc_pid_status(5), RssAnon, RssFile, RssShmem.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path("/")
# A child just forked by vfork or posix_spawn still shows the memory of its parent: it counts once it is this old.
SETTLED_SECONDS = 0.05
# The tree is listed anew after this long, and never so often that the listing takes more than this share of the time.
LISTING_SECONDS, LISTING_SHARE = 1.0, 0.001


@dataclass(frozen=True)
class Usage:
    """Memory of one process or of a tree, in bytes."""

    anon_bytes: int  # cannot be dropped: heap, stacks, tensors, shared memory
    file_bytes: int  # can be dropped: mapped files


@cache
def has_proc(root: Path = ROOT) -> bool:
    """Whether /proc tells anonymous and file-backed memory apart here (Linux 4.5 or later)."""
    try:
        pid = os.getpid()
        if root != ROOT:
            pid = next(int(path.name) for path in (root / "proc").iterdir() if path.name.isdigit())
        return b"RssAnon:" in (root / f"proc/{pid}/status").read_bytes()
    except (OSError, StopIteration):
        return False


def process_usage(pid: int, root: Path = ROOT) -> Usage | None:
    """Memory of one process; None where it has ended."""
    fields = _read_fields(pid, root)
    return None if fields is None else Usage(fields[0] + fields[2], fields[1])


def usage_of(pids: list[int], root: Path = ROOT) -> Usage:
    """Memory of several processes together; those that have ended hold nothing."""
    found = [fields for fields in (_read_fields(pid, root) for pid in pids) if fields is not None]
    shared = max((fields[2] for fields in found), default=0)
    return Usage(sum(fields[0] for fields in found) + shared, sum(fields[1] for fields in found))


def tree_pids(pid: int, root: Path = ROOT) -> list[int]:
    """A process and all its descendants, the process first."""
    if not (root / f"proc/{pid}/task/{pid}/children").exists():  # also a Linux without CONFIG_PROC_CHILDREN
        import psutil

        with suppress(psutil.Error):
            return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        return [pid]
    pids = [pid]
    for parent in pids:  # grows while it is walked
        pids += [child for child in _listed_children(parent, root) if child not in pids]
    return pids


def parent_pid(pid: int, root: Path = ROOT) -> int:
    """The parent of a process; 0 where it has ended or cannot be read."""
    try:
        with open(f"{root}/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])  # the name before the bracket may hold anything
    except (OSError, IndexError, ValueError):
        return 0


class ProcessTree:
    """The memory of a process and its descendants, cheap enough to be asked several times a second.

    Args:
        pid: its root; the own process by default.
        root: where /proc lies.
    """

    def __init__(self, pid: int | None = None, root: Path = ROOT) -> None:
        self.pid, self.root = os.getpid() if pid is None else pid, root
        self._first_seen: dict[int, float] = {}
        self._next_listing = 0.0

    def usage(self) -> Usage:
        """Memory now. A new child counts from the first call after the one that found it."""
        now = time.monotonic()
        settled = [pid for pid, seen in self._first_seen.items() if now - seen >= SETTLED_SECONDS]
        if now >= self._next_listing:
            start = time.thread_time()
            self._first_seen = {pid: self._first_seen.get(pid, now) for pid in tree_pids(self.pid, self.root)[1:]}
            self._next_listing = now + max(LISTING_SECONDS, (time.thread_time() - start) / LISTING_SHARE)
        return usage_of([self.pid, *(pid for pid in settled if pid in self._first_seen)], self.root)


def _read_fields(pid: int, root: Path) -> tuple[int, int, int] | None:
    if not has_proc(root):
        return _psutil_fields(pid)
    try:
        with open(f"{root}/proc/{pid}/status", "rb") as file:
            text = file.read()
    except OSError:
        return None
    return _kib(text, b"RssAnon:"), _kib(text, b"RssFile:"), _kib(text, b"RssShmem:")


def _kib(text: bytes, name: bytes) -> int:
    tail = text.partition(name)[2]
    return int(tail.split(None, 1)[0]) * 1024 if tail else 0  # a zombie has no Rss lines


def _listed_children(pid: int, root: Path) -> list[int]:
    children: list[int] = []
    folder = f"{root}/proc/{pid}/task"
    with suppress(OSError):  # the thread or the process has ended
        for thread in os.listdir(folder):
            with open(f"{folder}/{thread}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def _psutil_fields(pid: int) -> tuple[int, int, int] | None:
    """Windows tells private memory; macOS only what is resident, which then counts as anonymous."""
    import psutil

    try:
        info = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None
    shared = getattr(info, "shared", 0)
    anon = getattr(info, "private", info.rss - shared)
    return anon, max(0, info.rss - anon), 0
