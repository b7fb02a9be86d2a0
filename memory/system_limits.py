"""What the system lets one rank take: available RAM, memory nodes, control groups and limits of the process.

Every limit is turned into the same figure, *what this process tree may hold in all*: the limit, less what others
already use of it, so that the figures are comparable and the lowest one binds. What cannot be read limits nothing.
Source: proc_meminfo(5), getrlimit(2), proc_pid_mountinfo(5); Linux admin-guide/cgroup-v2 and cgroup-v1/memory.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

from memory.processes import ROOT, sizes_of, text_of, tree_pids, usage_of
from settings.errors import UserError
from support.units import GIB, MIB

NODES = "RAM of the memory nodes allowed (cpuset)"
COMMITTED = "memory not yet committed (vm.overcommit_memory=2)"
# Limits of addresses and of mappings that the process alone writes to, the name of each in /proc/PID/limits, and what
# counts against it in /proc/PID/status.
PROCESS_LIMITS = (
    ("address space (ulimit -v)", "Max address space", "VmSize"),
    ("data segment (ulimit -d)", "Max data size", "VmData"),
)
# Files and lines of memory.stat of a control group, version 1 before version 2.
GROUP_LIMITS = ("hierarchical_memory_limit", "memory.limit_in_bytes", "memory.high", "memory.max")
GROUP_USAGE = ("memory.usage_in_bytes", "memory.current")
FILE_PAGES = ("inactive_file", "active_file", "slab_reclaimable")
UNLIMITED = 2**60  # Version 1 writes about 2^63 where there is no limit.
MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .* - (cgroup2?) \S+ (\S+)$", re.MULTILINE)
RANK_MARKS = ("MASTER_PORT=", "TORCHELASTIC_RUN_ID=")
MARGIN_SHARE = 0.05
LEAST_MARGIN = 32 * MIB
MOST_MARGIN = 2 * GIB


class Limit(NamedTuple):
    """One limit: what this process tree may hold at most because of it, in bytes."""

    what: str
    bytes: int


class SystemLimit(NamedTuple):
    """One limit as the system sets it, in bytes.

    Args:
        what: its name, such as "cgroup /docker/ab12 memory.max".
        limit_bytes: what all processes under it may hold together.
        used_bytes: what they hold now, without what the kernel drops before it refuses memory.
    """

    what: str
    limit_bytes: int
    used_bytes: int

    def for_holder(self, own_bytes: int) -> int:
        """What a holder of `own_bytes` of it may hold in all."""
        return max(0, self.limit_bytes - max(0, self.used_bytes - own_bytes))


def host_limits(local_processes: int = 1, *, root: Path = ROOT, pid: int | None = None) -> list[Limit]:
    """Everything but the user that limits one rank's memory on the host; never empty.

    Args:
        local_processes: ranks on this machine, which share what it has.
        root: "/", or a folder that holds a copy of /proc and /sys.
        pid: the process that asks; this one by default.
    """
    pid = pid or os.getpid()
    pids = set(tree_pids(pid, root))
    if local_processes > 1:
        pids.update(_other_ranks(pid, root))
    ranks = usage_of(list(pids), root).anon_bytes
    own = usage_of([pid], root).anon_bytes
    limits = [Limit(limit.what, limit.for_holder(ranks) // local_processes) for limit in shared_limits(pid, root)]
    return limits + [Limit(limit.what, limit.for_holder(own)) for limit in process_limits(pid, root)]


def _other_ranks(pid: int, root: Path) -> list[int]:
    """The processes of the launcher that has started this rank."""
    mark = _rank_mark(pid, root)
    if mark:
        everyone = [int(path.name) for path in root.glob("proc/[0-9]*")]
        return [other for other in everyone if _rank_mark(other, root) == mark]
    # A launcher that forks its ranks, as of a notebook, marks them where the system does not show it.
    parent = re.search(r"^PPid:\s+(\d+)", text_of(root / f"proc/{pid}/status"), re.MULTILINE)
    return tree_pids(int(parent[1]), root)[1:] if parent and int(parent[1]) > 1 else []


def _rank_mark(pid: int, root: Path) -> list[str]:
    """What the ranks of one launcher have in common in the environment they began with; empty for other processes."""
    words = text_of(root / f"proc/{pid}/environ").split("\0")
    is_rank = any(word.startswith("LOCAL_RANK=") for word in words)
    return sorted(word for word in words if is_rank and word.startswith(RANK_MARKS))


def installed_bytes(*, root: Path = ROOT, pid: int | None = None) -> int:
    """RAM of the machine, or the least that a container allows of it. It does not change as others work."""
    limits = shared_limits(pid or os.getpid(), root)
    return min(limit.limit_bytes for limit in limits if limit.what != COMMITTED)


def free_host_bytes(*, root: Path = ROOT, pid: int | None = None) -> int:
    """What this process may still take before a limit of the system stops it."""
    pid = pid or os.getpid()
    limits = shared_limits(pid, root) + process_limits(pid, root)
    return max(0, min(limit.limit_bytes - limit.used_bytes for limit in limits))


def margin_of(limit_bytes: int) -> int:
    """What is left free below a limit of the system, in bytes."""
    share = int(MARGIN_SHARE * limit_bytes)
    return min(limit_bytes, max(LEAST_MARGIN, min(MOST_MARGIN, share)))


def shared_limits(pid: int, root: Path = ROOT) -> list[SystemLimit]:
    """The limits that a process shares with others: RAM first.

    Raises:
        UserError: Linux does not show its memory, as psutil reads the same files.
    """
    memory = sizes_of(root / "proc/meminfo")
    total = memory["MemTotal"]
    available = memory["MemAvailable"]
    if not (total and available):
        try:
            total, available, *_ = psutil.virtual_memory()
        except OSError as error:
            raise UserError(
                "{file}, cannot be read, but the system reports its memory there; mount /proc", file=error.filename
            ) from None
    limits = [SystemLimit("available RAM", total, total - available)]
    status = text_of(root / f"proc/{pid}/status")
    allowed = _numbers(status.partition("Mems_allowed_list:")[2].partition("\n")[0])
    online = _numbers(text_of(root / "sys/devices/system/node/online"))
    if allowed and online - allowed:  # `docker --cpuset-mems` allows some nodes alone.
        files = [root / f"sys/devices/system/node/node{node}/meminfo" for node in allowed & online]
        nodes = sum(map(sizes_of, files), Counter[str]())
        usable = nodes["MemFree"] + nodes["Active(file)"] + nodes["Inactive(file)"]
        limits.append(SystemLimit(NODES, nodes["MemTotal"], nodes["MemTotal"] - usable))
    if text_of(root / "proc/sys/vm/overcommit_memory").strip() == "2":  # The system grants no more than it holds.
        limits.append(SystemLimit(COMMITTED, memory["CommitLimit"], memory["Committed_AS"]))
    return limits + group_limits(pid, root)


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8."""
    ranges = re.findall(r"(\d+)-?(\d*)", text)
    return {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}


def process_limits(pid: int, root: Path = ROOT) -> list[SystemLimit]:
    """The limits of one process, which count addresses and not memory. Windows and macOS keep to none."""
    text = text_of(root / f"proc/{pid}/limits")
    status = sizes_of(root / f"proc/{pid}/status")
    limits = []
    for what, name, mapped in PROCESS_LIMITS:
        soft = re.search(rf"{name}\s+(\d+)", text)
        if soft:
            limits.append(SystemLimit(what, int(soft[1]), status[mapped]))
    return limits


def group_limits(pid: int, root: Path = ROOT) -> list[SystemLimit]:
    """The limits of all control groups above a process, of version 1 and 2; each level may hold some.

    Pages of files are charged to a group too, but the kernel drops them before it kills, so they do not count as used.
    """
    mounts = {"cgroup2": ("/", "/sys/fs/cgroup"), "cgroup": ("/", "/sys/fs/cgroup/memory")}
    for top, folder, kind, options in reversed(MOUNT.findall(text_of(root / f"proc/{pid}/mountinfo"))):
        if kind == "cgroup2" or "memory" in options.split(","):
            mounts[kind] = (top, folder)
    limits = []
    for line in text_of(root / f"proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, folder = mounts["cgroup" if controllers else "cgroup2"]
        # In a container the path may lead outside of what is mounted, which then is the process's own group.
        group = PurePosixPath("/")
        if PurePosixPath(path).is_relative_to(top):
            group /= PurePosixPath(path).relative_to(top)
        for level in (group, *group.parents):
            level_folder = root / f"{folder}/{level}".lstrip("/")
            if level != group and text_of(level_folder / "memory.use_hierarchy").strip() == "0":
                break  # Groups of version 1 from here on do not count their children.
            numbers = _group_numbers(level_folder)
            pages = sum(numbers[f"total_{name}"] or numbers[name] for name in FILE_PAGES)
            used = max(0, sum(numbers[name] for name in GROUP_USAGE) - pages)
            # If two names stand for one figure, the later name is shown.
            names = {numbers[name]: name for name in GROUP_LIMITS if numbers.get(name, UNLIMITED) < UNLIMITED}
            limits += [SystemLimit(f"cgroup {level} {name}", size, used) for size, name in names.items()]
    return limits


def _group_numbers(folder: Path) -> Counter[str]:
    """The numbers in a control group's files and in the lines of its memory.stat; a limit of "max" is none."""
    lines = [f"{name} {text_of(folder / name)}" for name in (*GROUP_LIMITS, *GROUP_USAGE)]
    text = "\n".join([*lines, text_of(folder / "memory.stat")])
    return Counter({name: int(number) for name, number in re.findall(r"^(\S+) (\d+)$", text, re.MULTILINE)})
