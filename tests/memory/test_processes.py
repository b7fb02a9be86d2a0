"""Memory of a process and its descendants, anonymous and file-backed apart."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from memory.processes import ProcessTree, Usage, has_proc, tree_pids, usage_of
from support.units import MIB
from tests.memory.fake_machine import ME, FakeMachine


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    machine = FakeMachine(tmp_path, anon=10 * MIB)
    machine.process(101, parent=ME, anon=20 * MIB, file=5 * MIB, shared=3 * MIB, name="with ) bracket")
    machine.process(102, parent=101, anon=40 * MIB, shared=2 * MIB)
    machine.process(103, parent=1, anon=999 * MIB)
    return machine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_tree_holds_descendants_of_all_threads_whose_shared_memory_counts_once(machine: FakeMachine) -> None:
    assert tree_pids(ME, machine.root) == [ME, 101, 102]
    machine.write("proc/104/status", "Name:\tpy\nState:\tZ (zombie)\n")
    assert usage_of([101], machine.root) == Usage(23 * MIB, 5 * MIB)
    assert usage_of([ME, 101, 102, 104, 4040], machine.root) == Usage((10 + 20 + 40 + 3) * MIB, 5 * MIB)
    machine.write(f"proc/{ME}/task/{ME}/children", "")
    machine.write(f"proc/{ME}/task/999/children", "103 ")
    assert tree_pids(ME, machine.root) == [ME, 103]


@pytest.mark.skipif(not has_proc(), reason="/proc does not tell anonymous memory here")
def test_a_real_child_is_counted(clock: list[float]) -> None:
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
