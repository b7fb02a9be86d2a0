from __future__ import annotations

import pytest

from memory.budget import measure_budget
from memory.system_limits import free_host_bytes
from tests.fake_device import FakeDevice
from tests.memory.fake_machine import GIB, ME, FakeMachine

CPU = FakeDevice()
RANK = "PATH=/bin\0MASTER_PORT=29500\0TORCHELASTIC_RUN_ID=none\0LOCAL_RANK={rank}\0"


@pytest.fixture
def machine(tmp_path):
    return FakeMachine(tmp_path, available=16 * GIB)


def ask(machine, flag="auto", device=CPU, ranks=1):
    return measure_budget(flag, device, ranks, root=machine.root, pid=ME)


def test_without_any_limit_the_available_ram_binds_less_a_stated_margin(machine):
    got = ask(machine)
    assert got.binding == "available RAM" and got.available_bytes == 16 * GIB
    assert got.margin_bytes == int(0.05 * 16 * GIB) and got.host_bytes == 16 * GIB - got.margin_bytes
    assert got.device_bytes is None
    assert "available RAM" in got.describe() and "left free" in got.describe()


def test_what_the_process_already_holds_belongs_to_its_budget(tmp_path):
    got = ask(FakeMachine(tmp_path, available=4 * GIB, anon=GIB))
    assert got.available_bytes == 5 * GIB


def test_a_smaller_flag_wins_and_is_not_reduced(machine):
    got = ask(machine, 3 * GIB)
    assert (got.host_bytes, got.binding, got.margin_bytes, got.warnings) == (3 * GIB, "memory_budget", 0, ())
    assert [limit.what for limit in got.limits] == ["memory_budget", "available RAM"]


def test_a_larger_flag_is_reported_and_the_lower_limit_binds(machine):
    got = ask(machine, 64 * GIB)
    assert got.binding == "available RAM" and got.host_bytes == ask(machine).host_bytes
    assert len(got.warnings) == 1 and "64.00 GiB" in got.warnings[0] and "available RAM" in got.warnings[0]


def test_a_group_counts_what_others_use_but_not_file_pages_nor_our_own(tmp_path):
    machine = FakeMachine(tmp_path, anon=GIB)
    machine.groups("0::/job\n")
    machine.v2("job", limit=8 * GIB, used=5 * GIB, file_pages=2 * GIB)  # others: 5 - 2 of files - 1 of ours = 2
    got = ask(machine)
    assert got.binding == "cgroup /job memory.max" and got.available_bytes == 6 * GIB


def test_the_memory_of_the_whole_machine_is_that_of_its_container(tmp_path):
    """Whatever others use of it, the user allows, and however many ranks there are."""
    machine = FakeMachine(tmp_path, available=4 * GIB)
    assert ask(machine, 2 * GIB, ranks=4).installed_bytes == 32 * GIB
    machine.groups("0::/job\n")
    machine.v2("job", limit=8 * GIB, used=5 * GIB)
    assert ask(machine, ranks=2).installed_bytes == 8 * GIB


def test_ranks_share_the_system_limits_but_each_has_the_flag(machine):
    assert ask(machine, ranks=4).available_bytes == 4 * GIB
    assert ask(machine, 2 * GIB, ranks=4).host_bytes == 2 * GIB
    (told,) = ask(machine, 6 * GIB, ranks=4).warnings
    assert "each of 4 processes: 4 x 6.00 GiB = 24.00 GiB" in told and "for each of them" in told


def test_memory_of_the_other_ranks_counts_as_our_own(tmp_path):
    machine = FakeMachine(tmp_path, available=8 * GIB, anon=GIB)
    machine.process(50, parent=1, anon=GIB)  # the launcher is no rank
    machine.process(101, parent=50, anon=GIB, name="a ) odd ( name")
    machine.process(102, parent=101, anon=2 * GIB)
    machine.process(7, parent=1, anon=GIB)
    for rank, pid in enumerate((ME, 101, 102)):  # children have the environment of their rank
        machine.write(f"proc/{pid}/environ", RANK.format(rank=min(rank, 1)))
    assert ask(machine, ranks=2).available_bytes == (8 + 4) * GIB // 2


@pytest.mark.parametrize("name", ["Max address space", "Max data size"])
def test_limits_of_a_process(tmp_path, name):
    machine = FakeMachine(tmp_path, available=15 * GIB)
    machine.process(ME, parent=50, anon=GIB, mapped=2 * GIB)
    machine.write(
        f"proc/{ME}/limits", f"Limit   Soft Limit  Hard Limit  Units\n{name}   {6 * GIB}   unlimited   bytes\n"
    )
    assert ask(machine).available_bytes == 5 * GIB


def test_separate_device_memory_has_its_own_budget(machine):
    device = FakeDevice(8 * GIB)
    device.allocate(GIB)
    assert ask(machine, device=device).device_bytes == 8 * GIB - int(0.05 * 8 * GIB)  # what is ours is not lost to us
    assert ask(machine, 2 * GIB, device).device_bytes == 2 * GIB
    too_much = ask(machine, 12 * GIB, device)
    assert too_much.device_bytes < 8 * GIB and too_much.host_bytes == 12 * GIB
    assert len(too_much.warnings) == 1 and "fake device" in too_much.warnings[0]


def test_shared_device_memory_is_no_more_than_the_host_budget(machine):
    shared = FakeDevice(12 * GIB, separate=False)
    assert ask(machine, 2 * GIB, shared).device_bytes == 2 * GIB
    assert ask(machine, device=shared).device_bytes == 12 * GIB - int(0.05 * 12 * GIB)


def test_where_proc_is_absent_psutil_answers(tmp_path):
    got = measure_budget("auto", CPU, root=tmp_path)
    assert got.binding == "available RAM" and got.host_bytes > 0


def test_free_bytes_are_the_least_limit_less_what_is_held(tmp_path):
    machine = FakeMachine(tmp_path, available=15 * GIB, anon=GIB)
    machine.groups("0::/job\n")
    machine.v2("job", limit=4 * GIB, used=2 * GIB)
    assert free_host_bytes(root=tmp_path, pid=ME) == 2 * GIB


@pytest.mark.parametrize(("launcher", "by_script"), [(50, False), (1, True)])
def test_ranks_are_known_by_their_launcher(tmp_path, launcher, by_script):
    """Also where it is the first process of a container, and where a script of each rank lies between."""
    machine = FakeMachine(tmp_path, available=8 * GIB, anon=GIB)
    machine.process(1, parent=0)
    machine.process(50, parent=1, anon=GIB)
    for rank, pid in enumerate((ME, 101)):
        above = launcher if not by_script else pid + 100
        machine.process(pid, parent=above, anon=GIB)
        machine.write(f"proc/{pid}/environ", RANK.format(rank=rank))
        if by_script:
            machine.process(above, parent=launcher)
            machine.write(f"proc/{above}/environ", RANK.format(rank=rank))
    machine.process(7, parent=1, anon=4 * GIB)  # another job on this machine, or beside it in the container
    machine.write("proc/7/environ", RANK.format(rank=0).replace("29500", "29501"))
    assert ask(machine, ranks=2).available_bytes == (8 + 2) * GIB // 2


def test_memory_nodes_that_are_not_allowed_do_not_count(machine):
    assert ask(machine).available_bytes == 16 * GIB
    machine.write("sys/devices/system/node/online", "0-1\n")
    for node, free in ((0, 3), (1, 9)):
        lines = {"MemTotal": 16, "MemFree": free, "Active(file)": 1, "Inactive(file)": 0}
        text = "".join(f"Node {node} {name}:  {size * GIB // 1024} kB\n" for name, size in lines.items())
        machine.write(f"sys/devices/system/node/node{node}/meminfo", text)
    status = (machine.root / f"proc/{ME}/status").read_text()
    for allowed, expected in (("0-1", 16), ("0", 4), ("1", 10)):
        machine.write(f"proc/{ME}/status", f"{status}Mems_allowed:\t1\nMems_allowed_list:\t{allowed}\n")
        assert ask(machine).available_bytes == expected * GIB


@pytest.mark.parametrize("mode, expected", [(0, 16), (2, 5)])
def test_a_system_that_grants_no_more_than_it_holds(machine, mode, expected):
    text = (machine.root / "proc/meminfo").read_text()
    machine.write("proc/meminfo", f"{text}CommitLimit: {8 * GIB // 1024} kB\nCommitted_AS: {3 * GIB // 1024} kB\n")
    machine.write("proc/sys/vm/overcommit_memory", f"{mode}\n")
    assert ask(machine).available_bytes == expected * GIB
