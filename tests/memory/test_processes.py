from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memory import processes
from memory.processes import ProcessTree, Usage, has_proc, tree_pids, usage_of
from tests.memory.fake_machine import ME, MIB, FakeMachine

needs_proc = pytest.mark.skipif(not has_proc(), reason="/proc does not tell anonymous memory here")


@pytest.fixture
def machine(tmp_path):
    machine = FakeMachine(tmp_path, anon=10 * MIB)
    machine.process(101, parent=ME, anon=20 * MIB, file=5 * MIB, shared=3 * MIB, name="with ) bracket")
    machine.process(102, parent=101, anon=40 * MIB, shared=2 * MIB)
    machine.process(103, parent=1, anon=999 * MIB)
    return machine


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    return now


def test_the_tree_holds_descendants_only(machine):
    assert tree_pids(ME, machine.root) == [ME, 101, 102]


def test_children_of_all_threads_count(machine):
    machine.write(f"proc/{ME}/task/{ME}/children", "")
    machine.write(f"proc/{ME}/task/999/children", "103 ")
    assert tree_pids(ME, machine.root) == [ME, 103]


def test_shared_memory_counts_once_and_ended_processes_not_at_all(machine):
    machine.write("proc/104/status", "Name:\tpy\nState:\tZ (zombie)\n")
    assert usage_of([101], machine.root) == Usage(23 * MIB, 5 * MIB)
    assert usage_of([ME, 101, 102, 104, 4040], machine.root) == Usage((10 + 20 + 40 + 3) * MIB, 5 * MIB)


def test_a_new_child_counts_once_it_has_settled(machine, clock):
    tree = ProcessTree(ME, machine.root)
    assert tree.usage().anon_bytes == 10 * MIB
    clock[0] += 0.01
    assert tree.usage().anon_bytes == 10 * MIB
    clock[0] += 1
    assert tree.usage().anon_bytes == 73 * MIB
    machine.process(101, parent=1)  # no longer ours
    machine.process(102, parent=1)
    clock[0] += 60
    assert tree.usage().anon_bytes == 10 * MIB


def test_without_proc_psutil_answers(tmp_path):
    pid = os.getpid()
    assert not has_proc(tmp_path) and tree_pids(pid, tmp_path)[0] == pid
    assert usage_of([pid], tmp_path).anon_bytes > MIB
    assert usage_of([2**22 + 1], tmp_path) == Usage(0, 0)
    assert tree_pids(2**22 + 1, tmp_path) == [2**22 + 1], "gone meanwhile"


@needs_proc
def test_a_real_child_is_counted(clock):
    program = "import sys; held = bytearray(b'x') * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        tree = ProcessTree()
        alone = tree.usage().anon_bytes
        clock[0] += 60
        both = tree.usage().anon_bytes
        child.communicate()
    assert both - alone >= 64 * MIB
