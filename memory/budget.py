"""What one rank may take: the least of what the user, the machine and its limits allow, on host and device.

A margin stays free below a limit of the system, since overrunning that means being killed; the user's own figure is a promise
and is taken unchanged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from language import join, say
from memory.observe.processes import ROOT, tree_pids, usage_of
from memory.observe.system_limits import Limit, host_limits, installed_bytes, margin_of
from settings.fields import AUTO
from units import format_size

if TYPE_CHECKING:
    from devices.base import Device

FLAG = "memory_budget"


@dataclass(frozen=True)
class Budget:
    """What one rank may take, in bytes, host and device apart; who takes memory asks `limit` and `used`."""

    host_bytes: int
    device_bytes: int | None  # None: the device has no memory of its own to count
    available_bytes: int  # what the system would give to this rank, whatever the user allows; no margin taken off
    limits: tuple[Limit, ...]  # of the host, lowest first
    binding: str  # name of the limit that decides host_bytes
    margin_bytes: int  # left free below the binding limit; 0 where the user's figure binds
    warnings: tuple[str, ...] = ()  # what the user asked for and cannot have; to be said once
    installed_bytes: int | None = None  # of the whole machine, whatever others use of it; None: as much as is available
    device: Device | None = None  # where tensors live; None: not known yet

    @property
    def is_on_device(self) -> bool:
        """Whether the budget is about a device's own memory, as a GPU's; else about the host's."""
        return self.device is not None and self.device.is_separate_memory and self.device_bytes is not None

    def limit(self) -> int:
        """The most that may be held, of the memory that the budget is about."""
        return int(self.device_bytes or 0) if self.is_on_device else self.host_bytes

    def used(self) -> int:
        """What is held of it now; free blocks of a device's cache are not."""
        on_device = 0 if self.device is None else self.device.memory_now_bytes()
        if self.is_on_device and self.device is not None:
            return on_device - self.device.memory_idle_bytes()
        return usage_of(tree_pids(os.getpid())).anon_bytes + on_device

    def child(self, size: int) -> Budget:
        """The same with another limit: what a smaller plan, or a child process, may hold."""
        return replace(self, device_bytes=size) if self.is_on_device else replace(self, host_bytes=size)

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
            allowed = say("{what} allows {size} here, which is used instead", what=what, size=size)
            if local_processes > 1:
                allowed = say("{what} allows {size} for each of them, which is used instead", what=what, size=size)
            warnings.append(_too_much(asked, allowed, local_processes))
    ordered = tuple(sorted(limits, key=lambda limit: limit.bytes))
    return Budget(
        host, None, min(limit.bytes for limit in system), ordered, binding, margin, tuple(warnings),
        installed_bytes(root=root, pid=pid),
    )  # fmt: skip


def with_device(budget: Budget, flag: int | str, device: Device) -> Budget:
    """The same budget, and what the device offers."""
    budget = replace(budget, device=device)
    if device.memory_total_bytes() == 0:
        return budget
    free = device.memory_free_bytes() + device.memory_now_bytes() - device.memory_idle_bytes()
    offered = free - margin_of(free)
    if not device.is_separate_memory:  # a share of the same RAM; host and device together keep to host_bytes
        return replace(budget, device_bytes=min(offered, budget.host_bytes))
    warnings = budget.warnings
    if flag != AUTO and int(flag) > offered:
        told = "{device} has {size} free, which is used there instead"
        instead = say(told, device=device.describe(), size=format_size(offered))
        warnings = (*warnings, _too_much(int(flag), instead))
    on_device = offered if flag == AUTO else min(offered, int(flag))
    return replace(budget, device_bytes=on_device, warnings=warnings)


def _too_much(asked: int, instead: str, processes: int = 1) -> str:
    size = format_size(asked)
    if processes > 1:
        return say(
            ("--memory_budget = {size}, applies to each of {count} processes: {count} x {size} = {all} exceeds the "
            "available memory: {instead}"),
            size=size, count=processes, all=format_size(processes * asked), instead=instead,
        )  # fmt: skip
    return say("--memory_budget = {size}, exceeds the available memory: {instead}", size=size, instead=instead)
