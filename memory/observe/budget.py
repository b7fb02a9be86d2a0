"""How much memory may this process take? The least of what the user, the machine and its limits allow.

Idea: every limit is turned into the same figure, *what this process tree may hold in all*: the limit, less what others
already use of it. A container's limit, its parents' limits, an address-space limit and the memory that is available are
then comparable, and the lowest one binds. A margin stays free below a limit of the system, since overrunning that means
being killed; the user's own figure is a promise and is taken unchanged.
Source: proc_meminfo(5), getrlimit(2); control groups in memory/observe/cgroup.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from language import join, say
from memory.observe.cgroup import group_limits, text_of
from memory.observe.processes import ROOT, has_proc, parent_pid, process_usage, tree_pids, usage_of
from settings.errors import UserError
from settings.fields import AUTO
from units import GIB, MIB, format_size

if TYPE_CHECKING:
    from devices.base import Device

FLAG = "memory_budget"
NODES, COMMITTED = "RAM of the memory nodes allowed (cpuset)", "memory not yet committed (vm.overcommit_memory=2)"
RANK_MARKS = (b"MASTER_PORT=", b"TORCHELASTIC_RUN_ID=")
MARGIN_SHARE, LEAST_MARGIN, MOST_MARGIN = 0.05, 32 * MIB, 2 * GIB


class Limit(NamedTuple):
    """One limit: what this process tree may hold at most because of it, in bytes."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Budget:
    """What one rank may take, in bytes. Host and device apart."""

    host_bytes: int
    device_bytes: int | None  # None: the device has no memory of its own to count
    available_bytes: int  # what the system would give to this rank, whatever the user allows; no margin taken off
    limits: tuple[Limit, ...]  # of the host, lowest first
    binding: str  # name of the limit that decides host_bytes
    margin_bytes: int  # left free below the binding limit; 0 where the user's figure binds
    warnings: tuple[str, ...] = ()  # what the user asked for and cannot have; to be said once
    installed_bytes: int | None = None  # what this rank could have on an empty machine; None: not known

    def describe(self) -> str:
        """Say in one line what may be taken and why."""
        size, others = format_size(self.host_bytes), [part for part in self.limits if part[0] != self.binding]
        if self.margin_bytes:
            margin = format_size(self.margin_bytes)
            told = [say("budget {size} ({why}, {margin} left free)", size=size, why=say(self.binding), margin=margin)]
        else:
            told = [say("budget {size} ({why})", size=size, why=say(self.binding))]
        if self.device_bytes is not None:
            told.append(say("device {size}", size=format_size(self.device_bytes)))
        if others:
            limits = join(", ", [join(" ", [say(what), format_size(size)]) for what, size in others])
            told.append(say("other limits: {limits}", limits=limits))
        return join("; ", told)


def measure_budget(
    flag: int | str, device: Device, local_processes: int = 1, *, root: Path = ROOT, pid: int | None = None
) -> Budget:
    """Find the budget of this rank. Ranks measure at different times: let them agree on the least.

    Args:
        flag: `memory_budget`: bytes for one rank, or "auto".
        device: where the tensors will live.
        local_processes: ranks on this machine; they share what the system offers, the flag is for each.
        root, pid: "/" and this process unless a test says otherwise.
    """
    return with_device(host_budget(flag, local_processes, root=root, pid=pid), flag, device)


def host_budget(flag: int | str, local_processes: int = 1, *, root: Path = ROOT, pid: int | None = None) -> Budget:
    """The budget of this rank as far as the host goes, before its device is known. Arguments as of `measure_budget`."""
    pid = os.getpid() if pid is None else pid
    system = host_limits(local_processes, root=root, pid=pid)
    usable = {limit: max(0, limit.bytes - margin_of(limit.bytes)) for limit in system}
    lowest = min(usable, key=lambda limit: usable[limit])
    binding, host, margin, warnings = lowest.what, usable[lowest], lowest.bytes - usable[lowest], []
    limits = system
    if flag != AUTO:
        asked = int(flag)
        limits = [*system, Limit(FLAG, asked)]
        if asked <= host:
            binding, host, margin = FLAG, asked, 0
        else:
            size, what = format_size(host), say(lowest.what)
            allowed = say("{what} allows {size} here; that is used instead", what=what, size=size)
            if local_processes > 1:
                allowed = say("{what} allows {size} to each of them; that is used instead", what=what, size=size)
            warnings.append(_too_much(asked, allowed, local_processes))
    ordered = tuple(sorted(limits, key=lambda limit: limit.bytes))
    return Budget(
        host, None, min(limit.bytes for limit in system), ordered, binding, margin, tuple(warnings),
        installed_bytes(local_processes, root=root, pid=pid),
    )  # fmt: skip


def with_device(budget: Budget, flag: int | str, device: Device) -> Budget:
    """The same budget, and what the device offers."""
    if device.memory_total_bytes() == 0:
        return budget
    free = device.memory_free_bytes() + device.memory_now_bytes() - device.memory_idle_bytes()
    offered = free - margin_of(free)
    if not device.is_separate_memory:  # a share of the same RAM; host and device together keep to host_bytes
        return replace(budget, device_bytes=min(offered, budget.host_bytes))
    warnings = budget.warnings
    if flag != AUTO and int(flag) > offered:
        told = "{device} has {size} free; that is used there instead"
        instead = say(told, device=device.describe(), size=format_size(offered))
        warnings = (*warnings, _too_much(int(flag), instead))
    on_device = offered if flag == AUTO else min(offered, int(flag))
    return replace(budget, device_bytes=on_device, warnings=warnings)


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


def installed_bytes(local_processes: int = 1, *, root: Path = ROOT, pid: int | None = None) -> int:
    """What one rank could have if nothing else ran: the RAM, and what control groups allow. It does not change as others work."""
    pid = os.getpid() if pid is None else pid
    groups = [group.limit_bytes for group in group_limits(pid, root)]
    return min([_ram_bytes(root)[1], *groups]) // local_processes


def free_host_bytes(*, root: Path = ROOT, pid: int | None = None) -> int:
    """What this process tree may still take before a limit of the system stops it."""
    pid = os.getpid() if pid is None else pid
    own = usage_of(tree_pids(pid, root), root).anon_bytes
    return max(0, min(limit.bytes for limit in host_limits(root=root, pid=pid)) - own)


def margin_of(limit_bytes: int) -> int:
    """What is left free below a limit of the system, in bytes."""
    share = int(MARGIN_SHARE * limit_bytes)
    return min(limit_bytes, max(LEAST_MARGIN, min(MOST_MARGIN, share)))


def _too_much(asked: int, instead: str, processes: int = 1) -> str:
    size = format_size(asked)
    if processes > 1:
        return say(
            "--memory_budget = {size}, is for each of {count} processes: {count} x {size} = {all} is more than there is: {instead}",
            size=size, count=processes, all=format_size(processes * asked), instead=instead,
        )  # fmt: skip
    return say("--memory_budget = {size}, is more than there is: {instead}", size=size, instead=instead)


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
    if "MemTotal" in kib:
        before_3_14 = kib.get("MemFree", 0) + kib.get("Buffers", 0) + kib.get("Cached", 0)
        return kib.get("MemAvailable", before_3_14) * 1024, kib["MemTotal"] * 1024
    import psutil

    try:
        told = psutil.virtual_memory()
    except OSError as error:
        raise UserError(
            say("{file}, cannot be read, where the system tells of its memory; mount /proc", file=error.filename)
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
