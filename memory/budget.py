"""What one rank may take: the least of what the user, the machine and its limits allow, on host and device.

A margin stays free below a limit of the system, since overrunning that means being killed; the user's own figure is a
promise and is taken unchanged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memory.processes import ROOT, tree_pids, usage_of
from memory.system_limits import Limit, host_limits, installed_bytes, margin_of
from settings.fields import AUTO
from support.language import join, say
from support.units import format_size

if TYPE_CHECKING:
    from devices.base import Device

FLAG = "memory_budget"


@dataclass(frozen=True)
class Budget:
    """What one rank may take, in bytes, host and device apart; who takes memory asks `limit` and `used`.

    Args:
        device_bytes: None: the device has no memory of its own to count.
        available_bytes: what the system would give to this rank, whatever the user allows, without a margin.
        limits: of the host, lowest first. binding: the name of the one that decides `host_bytes`.
        margin_bytes: left free below the binding limit; 0 where the user's figure binds.
        warnings: what the user asked for and cannot have; to be said once.
        installed_bytes: RAM of the whole machine, whatever others use of it; None: as much as is available.
        device: where tensors live; None: not known yet.
    """

    host_bytes: int
    device_bytes: int | None
    available_bytes: int
    limits: tuple[Limit, ...]
    binding: str
    margin_bytes: int
    warnings: tuple[str, ...] = ()
    installed_bytes: int | None = None
    device: Device | None = None

    @property
    def is_on_device(self) -> bool:
        """Whether the budget is about a device's own memory, as a GPU's; else about the host's."""
        return self.device is not None and self.device.is_separate_memory and self.device_bytes is not None

    def limit(self) -> int:
        """The most that may be held, of the memory that the budget is about."""
        return int(self.device_bytes or 0) if self.is_on_device else self.host_bytes

    def used(self) -> int:
        """What is held of it now; free blocks of a device's cache are not."""
        on_device = self.device.memory_now_bytes() if self.device else 0
        if self.device and self.is_on_device:
            return on_device - self.device.memory_idle_bytes()
        return usage_of(tree_pids(os.getpid())).anon_bytes + on_device

    def child(self, size: int) -> Budget:
        """The same with another limit: what a smaller plan, or a child process, may hold."""
        return replace(self, device_bytes=size) if self.is_on_device else replace(self, host_bytes=size)

    def describe(self) -> str:
        """Say in one line what may be taken and why."""
        why = say(self.binding)
        host = format_size(self.host_bytes)
        sentences = [say("budget {size} ({why})", size=host, why=why)]
        if self.margin_bytes:
            margin = format_size(self.margin_bytes)
            sentences = [say("budget {size} ({why}, {margin} left free)", size=host, why=why, margin=margin)]
        if self.device_bytes is not None:
            sentences.append(say("device {size}", size=format_size(self.device_bytes)))
        other_limits = [join(" ", [say(what), format_size(size)]) for what, size in self.limits if what != self.binding]
        if other_limits:
            sentences.append(say("other limits: {limits}", limits=join(", ", other_limits)))
        return join("; ", sentences)


def host_budget(flag: int | str, local_processes: int = 1, *, root: Path = ROOT, pid: int | None = None) -> Budget:
    """The budget of this rank as far as the host goes, before its device is known. Arguments as of `measure_budget`."""
    limits = sorted(host_limits(local_processes, root=root, pid=pid), key=lambda limit: limit.bytes)
    lowest = limits[0]
    margin = margin_of(lowest.bytes)
    installed = installed_bytes(root=root, pid=pid)
    budget = Budget(
        lowest.bytes - margin, None, lowest.bytes, tuple(limits), lowest.what, margin, installed_bytes=installed
    )
    if flag == AUTO:
        return budget
    requested = int(flag)
    limits = sorted([*limits, Limit(FLAG, requested)], key=lambda limit: limit.bytes)
    budget = replace(budget, limits=tuple(limits))
    if requested <= budget.host_bytes:
        return replace(budget, host_bytes=requested, binding=FLAG, margin_bytes=0)
    what = say(lowest.what)
    size = format_size(budget.host_bytes)
    if local_processes == 1:
        warning = _too_much(
            requested, say("{what} allows only {size} here, which is used instead", what=what, size=size)
        )
    else:
        warning = say(
            "--memory_budget = {size}, applies to each of {count} processes: {count} x {size} = {all} exceeds the "
            "available memory: {instead}",
            size=format_size(requested),
            count=local_processes,
            all=format_size(local_processes * requested),
            instead=say("{what} allows only {size} for each of them, which is used instead", what=what, size=size),
        )
    return replace(budget, warnings=(warning,))


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
    budget = replace(host_budget(flag, local_processes, root=root, pid=pid), device=device)
    if device.memory_total_bytes() == 0:
        return budget
    free = device.memory_free_bytes() + device.memory_now_bytes() - device.memory_idle_bytes()
    offered = free - margin_of(free)
    if not device.is_separate_memory:  # A share of the same RAM: host and device together keep to host_bytes.
        return replace(budget, device_bytes=min(offered, budget.host_bytes))
    if flag == AUTO or int(flag) <= offered:
        return replace(budget, device_bytes=offered if flag == AUTO else int(flag))
    instead = say(
        "{device} has only {size} free, which is used there instead",
        device=device.describe(),
        size=format_size(offered),
    )
    return replace(budget, device_bytes=offered, warnings=(*budget.warnings, _too_much(int(flag), instead)))


def _too_much(requested: int, instead: str) -> str:
    return say(
        "--memory_budget = {size}, exceeds the available memory: {instead}",
        size=format_size(requested),
        instead=instead,
    )
