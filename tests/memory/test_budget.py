"""What one rank may take: the least of the user's figure and of all limits, on host and device."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory.budget import Budget, measure_budget
from memory.system_limits import free_host_bytes
from support.units import GIB
from tests.fake_device import FakeDevice
from tests.memory.fake_machine import ME, FakeMachine

RANK = "PATH=/bin\0MASTER_PORT={port}\0TORCHELASTIC_RUN_ID=none\0LOCAL_RANK={rank}\0"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def budget_of(
    machine: FakeMachine, flag: int | str = "auto", device: FakeDevice | None = None, ranks: int = 1
) -> Budget:
    return measure_budget(flag, device or FakeDevice(), ranks, root=machine.root, pid=ME)


def test_without_any_limit_the_available_ram_binds_less_a_stated_margin(machine: FakeMachine) -> None:
    budget = budget_of(machine)
    margin = int(0.05 * 16 * GIB)
    assert (budget.binding, budget.available_bytes, budget.device_bytes) == ("available RAM", 16 * GIB, None)
    assert (budget.host_bytes, budget.margin_bytes) == (16 * GIB - margin, margin)
    assert "available RAM" in budget.describe() and "left free" in budget.describe()


def test_a_smaller_flag_binds_as_it_is_and_a_larger_one_is_reported(machine: FakeMachine) -> None:
    smaller = budget_of(machine, 3 * GIB)
    assert (smaller.host_bytes, smaller.binding, smaller.margin_bytes) == (3 * GIB, "memory_budget", 0)
    assert [limit.what for limit in smaller.limits] == ["memory_budget", "available RAM"] and not smaller.warnings
    larger = budget_of(machine, 64 * GIB)
    assert (larger.binding, larger.host_bytes) == ("available RAM", budget_of(machine).host_bytes)
    (warning,) = larger.warnings
    assert "64.00 GiB" in warning and "available RAM" in warning


def test_what_others_use_counts_but_not_file_pages_nor_our_own(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, available=15 * GIB, anon=GIB)
    assert budget_of(machine).available_bytes == 16 * GIB
    machine.groups("0::/job\n")
    machine.v2("job", limit=8 * GIB, used=5 * GIB, file_pages=2 * GIB)  # Others use 2: 5 less 2 of files and 1 of ours.
    budget = budget_of(machine)
    assert (budget.binding, budget.available_bytes) == ("cgroup /job memory.max", 6 * GIB)
    machine.v2("job", limit=4 * GIB, used=2 * GIB)
    assert free_host_bytes(root=tmp_path, pid=ME) == 2 * GIB


def test_the_memory_of_the_whole_machine_is_that_of_its_container(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, available=4 * GIB)
    assert budget_of(machine, 2 * GIB, ranks=4).installed_bytes == 32 * GIB
    machine.groups("0::/job\n")
    machine.v2("job", limit=8 * GIB, used=5 * GIB)
    assert budget_of(machine, ranks=2).installed_bytes == 8 * GIB


def test_ranks_share_the_system_limits_but_each_has_the_flag(machine: FakeMachine) -> None:
    assert budget_of(machine, ranks=4).available_bytes == 4 * GIB
    assert budget_of(machine, 2 * GIB, ranks=4).host_bytes == 2 * GIB
    (warning,) = budget_of(machine, 6 * GIB, ranks=4).warnings
    assert "each of 4 processes: 4 x 6.00 GiB = 24.00 GiB" in warning and "for each of them" in warning


def test_memory_of_the_other_ranks_counts_as_our_own(tmp_path: Path) -> None:
    """Ranks are known by their launcher, also where it is the first process of a container, and where a script of each
    rank lies between. The launcher is no rank, nor is another job on this machine.
    """
    machine = FakeMachine(tmp_path, available=8 * GIB)
    machine.process(1, parent=0)
    machine.process(50, parent=1, anon=GIB)
    machine.process(7, parent=1, anon=4 * GIB, environ=RANK.format(port=29501, rank=0))
    for rank, pid in enumerate((ME, 101)):
        environ = RANK.format(port=29500, rank=rank)
        machine.process(pid + 100, parent=1, environ=environ)
        machine.process(pid, pid + 100, GIB, name="a ) odd ( name", environ=environ)
    machine.process(102, parent=101, anon=2 * GIB, environ=RANK.format(port=29500, rank=1))
    assert budget_of(machine, ranks=2).available_bytes == (8 + 4) * GIB // 2


def test_limits_of_a_process(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, available=15 * GIB)
    machine.process(ME, parent=50, anon=GIB, mapped=2 * GIB)
    machine.write(
        f"proc/{ME}/limits", f"Limit   Soft Limit  Hard Limit  Units\nMax data size   {6 * GIB}   unlimited  bytes\n"
    )
    assert budget_of(machine).available_bytes == 5 * GIB


def test_memory_of_a_device(machine: FakeMachine) -> None:
    card = FakeDevice(8 * GIB)
    card.allocate(GIB)
    assert budget_of(machine, device=card).device_bytes == 8 * GIB - int(0.05 * 8 * GIB), "our own is not lost to us"
    assert budget_of(machine, 2 * GIB, card).device_bytes == 2 * GIB
    too_much = budget_of(machine, 12 * GIB, card)
    assert too_much.device_bytes is not None and too_much.device_bytes < 8 * GIB and too_much.host_bytes == 12 * GIB
    (warning,) = too_much.warnings
    assert "fake device" in warning
    shared = FakeDevice(12 * GIB, separate=False)
    assert budget_of(machine, 2 * GIB, shared).device_bytes == 2 * GIB, "no more than the host's budget"
    assert budget_of(machine, device=shared).device_bytes == 12 * GIB - int(0.05 * 12 * GIB)


def test_memory_nodes_that_are_not_allowed_do_not_count(machine: FakeMachine) -> None:
    machine.write("sys/devices/system/node/online", "0-1\n")
    for node, free in ((0, 3), (1, 9)):
        lines = {"MemTotal": 16, "MemFree": free, "Active(file)": 1, "Inactive(file)": 0}
        text = "".join(f"Node {node} {name}:  {size * GIB // 1024} kB\n" for name, size in lines.items())
        machine.write(f"sys/devices/system/node/node{node}/meminfo", text)
    status = (machine.root / f"proc/{ME}/status").read_text()
    for allowed, expected in (("0-1", 16), ("0", 4), ("1", 10)):
        machine.write(f"proc/{ME}/status", f"{status}Mems_allowed:\t1\nMems_allowed_list:\t{allowed}\n")
        assert budget_of(machine).available_bytes == expected * GIB
