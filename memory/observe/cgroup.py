"""Which memory limits do the control groups of a process set? Version 1 and 2, and every level above it.

Idea: each level from the process's own group up to the visible root may hold a limit, and at each the memory of other
processes is already used. Pages of files are charged to a group too, but the kernel drops them before it kills; so they
do not count as used. Inside a container the path may be relative to what is mounted, or name folders that are not
visible; what cannot be seen cannot be read and is left out.
Source: Linux admin-guide/cgroup-v2 and cgroup-v1/memory; proc_pid_mountinfo(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
