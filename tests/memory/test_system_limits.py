from __future__ import annotations

import pytest

from memory.system_limits import SystemLimit, group_limits
from tests.memory.fake_machine import GIB, ME, FakeMachine

V1_MOUNT = "32 31 0:29 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "33 31 0:30 {root} {where} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
UNLIMITED_V1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path):
    return FakeMachine(tmp_path)


def found(machine):
    return {limit.what: limit.limit_bytes for limit in group_limits(ME, machine.root)}


def test_version_2_reads_every_level_and_both_limits(machine):
    machine.groups("0::/user/job\n", V2_MOUNT.format(root="/", where="/sys/fs/cgroup"))
    machine.v2("user/job", limit="max", high=3 * GIB)
    machine.v2("user", limit=5 * GIB)
    assert found(machine) == {"cgroup /user/job memory.high": 3 * GIB, "cgroup /user memory.max": 5 * GIB}


def test_version_1_ignores_its_huge_number(machine):
    machine.groups("4:memory:/a/b\n3:cpu:/x\n", V1_MOUNT.format(root="/"))
    machine.v1("a/b", limit=UNLIMITED_V1)
    machine.v1("a", limit=2 * GIB)
    machine.v1("", limit=UNLIMITED_V1)
    assert found(machine) == {"cgroup /a memory.limit_in_bytes": 2 * GIB}


def test_hybrid_machine_with_memory_in_version_1(machine):
    mounts = V1_MOUNT.format(root="/") + V2_MOUNT.format(root="/", where="/sys/fs/cgroup/unified")
    machine.groups("4:cpu,memory:/a\n0::/a\n", mounts)
    machine.v1("a", limit=2 * GIB)
    machine.write("sys/fs/cgroup/unified/a/cgroup.procs", "100\n")
    assert found(machine) == {"cgroup /a memory.limit_in_bytes": 2 * GIB}


def test_container_with_a_namespace_sees_its_group_as_the_root(machine):
    machine.groups("0::/\n", V2_MOUNT.format(root="/", where="/sys/fs/cgroup"))
    machine.v2("", limit=GIB)
    assert found(machine) == {"cgroup / memory.max": GIB}


@pytest.mark.parametrize("path", ["/../../elsewhere", "/not/mounted"])
def test_a_path_outside_the_mount_falls_back_to_the_mount(machine, path):
    machine.groups(f"0::{path}\n", V2_MOUNT.format(root="/pod", where="/sys/fs/cgroup"))
    machine.v2("", limit=GIB)
    assert found(machine) == {"cgroup / memory.max": GIB}


def test_used_leaves_out_file_pages(machine):
    machine.groups("0::/a\n4:memory:/b\n", V1_MOUNT.format(root="/"))
    machine.v2("a", limit=4 * GIB, used=3 * GIB, file_pages=2 * GIB)
    machine.v1("b", limit=4 * GIB, used=GIB, file_pages=2 * GIB)
    assert group_limits(ME, machine.root) == [
        SystemLimit("cgroup /a memory.max", 4 * GIB, GIB),
        SystemLimit("cgroup /b memory.limit_in_bytes", 4 * GIB, 0),
    ]


def test_version_1_tells_of_a_group_above_that_is_not_visible(machine):
    """As of a container in a container: its parent's limit stands in its own statistics alone."""
    machine.groups("4:memory:/a\n", V1_MOUNT.format(root="/"))
    machine.v1("a", limit=UNLIMITED_V1, used=GIB)
    stat = "sys/fs/cgroup/memory/a/memory.stat"
    machine.write(stat, f"cache 5\nhierarchical_memory_limit {4 * GIB}\n")
    assert found(machine) == {"cgroup /a hierarchical_memory_limit": 4 * GIB}
    machine.write(stat, f"cache 5\nhierarchical_memory_limit {UNLIMITED_V1}\n")
    assert found(machine) == {}
    machine.v1("a", limit=2 * GIB)
    machine.write(stat, f"cache 5\nhierarchical_memory_limit {2 * GIB}\n")
    assert found(machine) == {"cgroup /a memory.limit_in_bytes": 2 * GIB}
