"""Control groups of both versions, as files show them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memory.system_limits import SystemLimit, group_limits
from support.units import GIB
from tests.memory.fake_machine import ME, FakeMachine

V1_MOUNT = "32 31 0:29 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "33 31 0:30 {root} {folder} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
UNLIMITED_V1 = 9223372036854771712
STAT = "sys/fs/cgroup/memory/a/memory.stat"


def every_level_of_version_2(machine: FakeMachine) -> None:
    machine.groups("0::/user/job\n", V2_MOUNT.format(root="/", folder="/sys/fs/cgroup"))
    machine.v2("user/job", limit="max", high=3 * GIB)
    machine.v2("user", limit=5 * GIB)


def huge_numbers_of_version_1(machine: FakeMachine) -> None:
    machine.groups("4:memory:/a/b\n3:cpu:/x\n", V1_MOUNT)
    machine.v1("a/b", limit=UNLIMITED_V1)
    machine.v1("a", limit=2 * GIB)
    machine.v1("", limit=UNLIMITED_V1)


def memory_in_version_1_beside_version_2(machine: FakeMachine) -> None:
    mounts = V1_MOUNT + V2_MOUNT.format(root="/", folder="/sys/fs/cgroup/unified")
    machine.groups("4:cpu,memory:/a\n0::/a\n", mounts)
    machine.v1("a", limit=2 * GIB)
    machine.write("sys/fs/cgroup/unified/a/cgroup.procs", "100\n")


def container_with_a_namespace(machine: FakeMachine) -> None:
    machine.groups("0::/\n", V2_MOUNT.format(root="/", folder="/sys/fs/cgroup"))
    machine.v2("", limit=GIB)


def parent_that_is_not_visible(machine: FakeMachine) -> None:
    """A container in a container: its parent's limit stands in its own statistics alone."""
    machine.groups("4:memory:/a\n", V1_MOUNT)
    machine.v1("a", limit=UNLIMITED_V1, used=GIB)
    machine.write(STAT, f"cache 5\nhierarchical_memory_limit {4 * GIB}\n")


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (every_level_of_version_2, {"/user/job memory.high": 3 * GIB, "/user memory.max": 5 * GIB}),
        (huge_numbers_of_version_1, {"/a memory.limit_in_bytes": 2 * GIB}),
        (memory_in_version_1_beside_version_2, {"/a memory.limit_in_bytes": 2 * GIB}),
        (container_with_a_namespace, {"/ memory.max": GIB}),
        (parent_that_is_not_visible, {"/a hierarchical_memory_limit": 4 * GIB}),
    ],
)
def test_limits_of_groups(tmp_path: Path, prepare: Callable[[FakeMachine], None], expected: dict[str, int]) -> None:
    machine = FakeMachine(tmp_path)
    prepare(machine)
    limits = {limit.what.removeprefix("cgroup "): limit.limit_bytes for limit in group_limits(ME, machine.root)}
    assert limits == expected


def test_used_leaves_out_file_pages(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.groups("0::/a\n4:memory:/b\n", V1_MOUNT)
    machine.v2("a", limit=4 * GIB, used=3 * GIB, file_pages=2 * GIB)
    machine.v1("b", limit=4 * GIB, used=GIB, file_pages=2 * GIB)
    assert group_limits(ME, machine.root) == [
        SystemLimit("cgroup /a memory.max", 4 * GIB, GIB),
        SystemLimit("cgroup /b memory.limit_in_bytes", 4 * GIB, 0),
    ]
