"""What the system lets one rank take: available RAM, memory nodes, control groups and limits of the process.

Every limit is turned into the same figure, *what this process tree may hold in all*: the limit, less what others already use
of it, so that they are comparable and the lowest one binds. Of control groups (version 1 and 2) each level from the process's
own up to the visible root may hold a limit; pages of files are charged to them too, but the kernel drops them before it kills,
so they do not count as used. Inside a container the path may be relative to what is mounted; what cannot be read is left out.
Source: proc_meminfo(5), getrlimit(2), proc_pid_mountinfo(5); Linux admin-guide/cgroup-v2 and cgroup-v1/memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from language import say
from memory.observe.processes import ROOT, has_proc, parent_pid, process_usage, tree_pids, usage_of
from settings.errors import UserError
from units import GIB, MIB

NODES, COMMITTED = "RAM of the memory nodes allowed (cpuset)", "memory not yet committed (vm.overcommit_memory=2)"
RANK_MARKS = (b"MASTER_PORT=", b"TORCHELASTIC_RUN_ID=")
MARGIN_SHARE, LEAST_MARGIN, MOST_MARGIN = 0.05, 32 * MIB, 2 * GIB


class Limit(NamedTuple):
    """One limit: what this process tree may hold at most because of it, in bytes."""

    what: str
    bytes: int


def host_limits(local_processes: int = 1, *, root: Path = ROOT, pid: int | None = None) -> list[Limit]:
    """Everything but the user that limits one rank's memory on the host; never empty."""
    pid = os.getpid() if pid is None else pid
    own = usage_of(_own_pids(pid, local_processes, root), root).anon_bytes
    left: dict[str, int | None] = {"available RAM": _ram_bytes(root)[0], NODES: _nodes_bytes(pid, root)}
    if text_of(root / "proc/sys/vm/overcommit_memory").strip() == "2":  # the system grants no more than it holds
        kib = _kib_of(text_of(root / "proc/meminfo"))
        left[COMMITTED] = max(0, kib.get("CommitLimit", 0) - kib.get("Committed_AS", 0)) * 1024
    limits = [Limit(what, (size + own) // local_processes) for what, size in left.items() if size is not None]
    for group in group_limits(pid, root):
        others = max(0, group.used_bytes - own)
        limits.append(Limit(group.what, max(0, group.limit_bytes - others) // local_processes))
    return limits + _own_limits(pid, root)


def installed_bytes(*, root: Path = ROOT, pid: int | None = None) -> int:
    """RAM of the machine, or the least that control groups allow of it. It does not change as others work."""
    pid = os.getpid() if pid is None else pid
    groups = [group.limit_bytes for group in group_limits(pid, root)]
    return min([_ram_bytes(root)[1], *groups])


def free_host_bytes(*, root: Path = ROOT, pid: int | None = None) -> int:
    """What this process tree may still take before a limit of the system stops it."""
    pid = os.getpid() if pid is None else pid
    own = usage_of(tree_pids(pid, root), root).anon_bytes
    return max(0, min(limit.bytes for limit in host_limits(root=root, pid=pid)) - own)


def margin_of(limit_bytes: int) -> int:
    """What is left free below a limit of the system, in bytes."""
    share = int(MARGIN_SHARE * limit_bytes)
    return min(limit_bytes, max(LEAST_MARGIN, min(MOST_MARGIN, share)))


def _own_pids(pid: int, local_processes: int, root: Path) -> list[int]:
    """This process's tree; with several ranks also the others', which their launcher started, be it by a script each."""
    if local_processes <= 1 or not has_proc(root):
        return tree_pids(pid, root)
    launcher, mark = parent_pid(pid, root), _rank_mark(pid, root)
    while launcher > 1 and mark and _rank_mark(launcher, root) == mark:
        launcher = parent_pid(launcher, root)
    if launcher > 1:
        return tree_pids(launcher, root)[1:]
    own = tree_pids(pid, root)  # the launcher is the first process of a container, which has started others too
    others = tree_pids(1, root)[1:] if launcher == 1 and mark else []
    return [*own, *(other for other in others if other not in own and _rank_mark(other, root) == mark)]


def _rank_mark(pid: int, root: Path) -> bytes:
    """What the ranks of one launcher have in common in the environment they began with; empty for other processes."""
    try:
        words = (root / f"proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return b""
    is_rank = any(word.startswith(b"LOCAL_RANK=") for word in words)
    return b" ".join(sorted(word for word in words if word.startswith(RANK_MARKS))) if is_rank else b""


def _ram_bytes(root: Path) -> tuple[int, int]:
    """RAM that is available, and all of it.

    Raises:
        UserError: Linux does not tell; psutil reads the same files.
    """
    kib = _kib_of(text_of(root / "proc/meminfo"))
    if {"MemAvailable", "MemTotal"} <= kib.keys():
        return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    import psutil

    try:
        told = psutil.virtual_memory()
    except OSError as error:
        raise UserError(
            say("{file}, cannot be read, but the system reports its memory there; mount /proc", file=error.filename)
        ) from None
    return int(told.available), int(told.total)


def _nodes_bytes(pid: int, root: Path) -> int | None:
    """What is free on the memory nodes that a process may use, as `docker --cpuset-mems`; None where it may use all."""
    allowed = _list_of(text_of(root / f"proc/{pid}/status").partition("Mems_allowed_list:")[2].split("\n")[0])
    there = _list_of(text_of(root / "sys/devices/system/node/online"))
    if not allowed or not there - allowed:
        return None
    total = 0
    for node in allowed & there:
        kib = _kib_of(text_of(root / f"sys/devices/system/node/node{node}/meminfo").replace(f"Node {node} ", ""))
        total += kib.get("MemFree", 0) + kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0)
    return total * 1024


def _list_of(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last if last.isdigit() else first) + 1))
    return found


def _kib_of(text: str) -> dict[str, int]:
    lines = (line.partition(":") for line in text.splitlines())
    return {name: int(rest.split()[0]) for name, _, rest in lines if rest.split()}


# limits of each process: of addresses, and of mappings that it alone writes to; neither counts memory
OWN_LIMITS = (
    ("address space (ulimit -v)", "Max address space", "VmSize:"),
    ("data segment (ulimit -d)", "Max data size", "VmData:"),
)


def _own_limits(pid: int, root: Path) -> list[Limit]:
    """What one process may still map, plus what it holds already; not shared with others."""
    try:
        limits = (root / f"proc/{pid}/limits").read_text()
        status = (root / f"proc/{pid}/status").read_text()
    except OSError:
        return []  # Windows and macOS have no such limits that are kept
    own, found = process_usage(pid, root), list[Limit]()
    for what, name, counted in OWN_LIMITS:
        soft = limits.partition(name)[2].split()[:1]
        if soft and soft[0].isdigit():
            mapped = int((status.partition(counted)[2].split() or ["0"])[0]) * 1024
            found.append(Limit(what, max(0, int(soft[0]) - mapped) + (own.anon_bytes if own else 0)))
    return found


ABOVE = "hierarchical_memory_limit"  # of version 1: the least of the group and all above it
UNLIMITED = 2**60  # version 1 writes about 2^63 where there is no limit


@dataclass(frozen=True)
class GroupLimit:
    """One limit of one group, in bytes."""

    what: str  # e.g. "cgroup /docker/ab12 memory.max"
    limit_bytes: int
    used_bytes: int  # by all processes of the group, pages of files left out


@dataclass(frozen=True)
class _Version:
    """Names of one version's files. `file_pages` are the parts of memory.stat that the kernel can drop."""

    default_mount: str
    limits: tuple[str, ...]
    usage: str
    file_pages: tuple[str, ...]


V1 = _Version(
    "/sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
V2 = _Version(
    "/sys/fs/cgroup",
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file", "slab_reclaimable"),
)


def group_limits(pid: int, root: Path) -> list[GroupLimit]:
    """All memory limits above a process, in no order. Empty where there are none, or no control groups.

    Args:
        pid: the process.
        root: "/" or a folder that holds a copy of /proc and /sys.
    """
    limits: list[GroupLimit] = []
    for line in text_of(root / f"proc/{pid}/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            limits += _limits_up(V2, path, pid, root)
        elif "memory" in controllers.split(","):
            limits += _limits_up(V1, path, pid, root)
    return limits


def _limits_up(version: _Version, path: str, pid: int, root: Path) -> Iterator[GroupLimit]:
    mount_point, mount_root = _find_mount(version, pid, root)
    group, top = PurePosixPath(path), PurePosixPath(mount_root)
    inside = PurePosixPath("/")  # the mount point itself, where the path leads outside what is mounted
    if ".." not in (*group.parts, *top.parts) and group.is_relative_to(top):
        inside /= group.relative_to(top)
    for depth, level in enumerate([inside, *inside.parents]):
        folder = root / mount_point.lstrip("/") / str(level).lstrip("/")
        if depth and text_of(folder / "memory.use_hierarchy").strip() == "0":
            return  # version 1: groups above do not count their children
        limits = {name: _number(text_of(folder / name)) for name in version.limits}
        if not depth:  # that of a group above which cannot be seen from here, as inside a container
            limits[ABOVE] = int(_stat(folder).get(ABOVE, UNLIMITED))
            if limits[ABOVE] == limits[version.limits[0]]:
                del limits[ABOVE]
        for name, limit in limits.items():
            if limit is not None and limit < UNLIMITED:
                yield GroupLimit(f"cgroup {level} {name}", limit, _used(version, folder))


def _find_mount(version: _Version, pid: int, root: Path) -> tuple[str, str]:
    for line in text_of(root / f"proc/{pid}/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2) if after.count(" ") >= 2 else (after, "", "")
        if kind == ("cgroup2" if version is V2 else "cgroup") and (version is V2 or "memory" in options.split(",")):
            fields = [re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), word) for word in before.split()]
            return fields[4], fields[3]
    return version.default_mount, "/"


def _used(version: _Version, folder: Path) -> int:
    used = _number(text_of(folder / version.usage)) or 0
    stat = _stat(folder)
    return max(0, used - sum(int(stat.get(name, 0)) for name in version.file_pages))


def _stat(folder: Path) -> dict[str, str]:
    return dict(line.split() for line in text_of(folder / "memory.stat").splitlines() if line.count(" ") == 1)


def _number(text: str) -> int | None:
    word = text.strip()
    return int(word) if word.isdigit() else None  # "max", or no such file


def text_of(path: Path) -> str:
    """The text of a file of the system; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf8", errors="replace")
    except OSError:
        return ""
