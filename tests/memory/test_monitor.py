from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from memory.monitor import Monitor
from memory.processes import ProcessTree, Usage, has_proc
from tests.fake_device import FakeDevice
from tests.memory.fake_machine import ME, FakeMachine

MIB = 2**20


class Scripted:
    """A process tree whose anonymous memory follows a script, in MiB; the last value stays."""

    def __init__(self, *anon_mib):
        self.values, self.called = list(anon_mib), threading.Semaphore(0)

    def usage(self):
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        self.called.release()
        return Usage(value * MIB, 7 * MIB)


def make(*anon_mib, device=None, **options):
    return Monitor(1000 * MIB, device or FakeDevice(), processes=Scripted(*anon_mib), **options)


def test_record_has_exactly_the_fields_of_a_memory_event():
    device = FakeDevice(900 * MIB)
    device.release(device.allocate(300 * MIB))
    device.cleanup()
    device.allocate(100 * MIB)
    monitor = make(200, 500, 400, device=device)
    monitor.sample()
    monitor.sample()
    got = monitor.record(12, "train")
    assert got == {
        "step": 12,
        "phase": "train",
        "anon_bytes": 400 * MIB,
        "file_bytes": 7 * MIB,
        "peak_bytes": 500 * MIB,
        "budget_bytes": 1000 * MIB,
        "device_bytes": 100 * MIB,
        "device_peak_bytes": 300 * MIB,
    }


def test_what_was_held_before_the_machine_had_less_is_not_held_against_the_new_budget():
    monitor = make(700, 300, 500)
    monitor.sample("prepare")
    monitor.watch(900 * MIB)
    assert monitor.counted_peak_bytes == 700 * MIB, "named otherwise, and not shrunk: the run's own limit"
    monitor.watch(400 * MIB, from_now=True)
    monitor.sample("train")
    assert (monitor.counted_peak_bytes, monitor.peak_bytes) == (300 * MIB, 700 * MIB)
    monitor.sample("train")
    assert monitor.counted_peak_bytes == 500 * MIB, "and so it is over"
    assert monitor.counted_phase_peaks["train"] == 500 * MIB


def test_peaks_are_kept_by_phase():
    monitor = make(100, 300, 200, 600, 500, 150)
    monitor.sample()  # start: 100
    with monitor.phase("train"):  # 300 on entry
        monitor.sample()  # 200
        with monitor.phase("evaluation"):  # 600 and 500 at its ends
            pass
    assert monitor.phase_peaks == {"start": 100 * MIB, "train": 300 * MIB, "evaluation": 600 * MIB}
    assert monitor.peak_bytes == 600 * MIB and monitor.sample().phase == "start"


def test_line_is_one_line_that_can_be_grepped():
    monitor = make(250)
    monitor.sample("train")
    line = monitor.line(40)
    assert "内存监控" in line and "\n" not in line
    for part in ("step 40", "train", "250.0 MiB", "7.0 MiB", "1000.0 MiB (25% in use)"):
        assert part in line
    device = FakeDevice(900 * MIB)
    device.allocate(100 * MIB)
    monitor = make(1, device=device)
    monitor.sample()
    assert "fake 100.0 MiB (peak 100.0 MiB)" in monitor.line(1)


def test_pressure_is_the_higher_of_host_and_device():
    device = FakeDevice(900 * MIB)
    device.allocate(400 * MIB)
    monitor = make(300, device=device)
    monitor.sample()
    assert monitor.pressure() == pytest.approx(0.3)
    monitor = make(300, device=device, device_budget_bytes=500 * MIB)
    monitor.sample()
    assert monitor.pressure() == monitor.plan_pressure() == pytest.approx(0.8)
    device.release(300 * MIB)  # idle blocks do not press
    monitor.sample()
    assert monitor.pressure() == pytest.approx(0.3) and monitor.plan_pressure() == pytest.approx(0.2)


def test_pinned_ram_counts_which_the_system_does_not_call_anonymous(monkeypatch):
    device = FakeDevice(900 * MIB)
    monkeypatch.setattr(device, "pinned_bytes", lambda: 200 * MIB)
    monitor = make(300, device=device)
    assert monitor.sample().anon_bytes == monitor.peak_bytes == 500 * MIB and monitor.pressure() == pytest.approx(0.5)


def test_where_device_and_host_share_the_ram_one_budget_holds_both():
    device = FakeDevice(900 * MIB, separate=False)
    device.allocate(400 * MIB)
    monitor = make(300, device=device)
    assert monitor.sample().anon_bytes == 300 * MIB
    assert monitor.peak_bytes == 700 * MIB
    assert monitor.pressure() == monitor.plan_pressure() == pytest.approx(0.7)


def test_what_lived_between_two_samples_is_known_from_the_kernels_mark(tmp_path):
    machine = FakeMachine(tmp_path)
    machine.process(ME, parent=50, anon=300 * MIB, file=50 * MIB, highest=800 * MIB)
    monitor = Monitor(1000 * MIB, FakeDevice(), processes=ProcessTree(ME, tmp_path))
    monitor.sample("load")
    assert monitor.peak_bytes == 300 * MIB, "what was held before anybody watched is not the run's"
    machine.process(ME, parent=50, anon=200 * MIB, file=60 * MIB, highest=900 * MIB)
    monitor.sample("train")
    machine.process(ME, parent=50, anon=250 * MIB, file=60 * MIB, highest=900 * MIB)
    monitor.sample("save")
    assert monitor.phase_peaks == {"load": 300 * MIB, "train": 840 * MIB, "save": 250 * MIB}
    assert monitor.peak_bytes == 840 * MIB


def test_the_thread_samples_until_it_is_stopped():
    tree = Scripted(100, 100, 100, 700, 100)
    monitor = Monitor(1000 * MIB, FakeDevice(), 0.01, processes=tree)
    with monitor:
        assert all(tree.called.acquire(timeout=20) for _ in range(6))
        assert sum(thread.name == "memory-monitor" for thread in threading.enumerate()) == 1
    assert monitor.peak_bytes == 700 * MIB and monitor.cost_seconds > 0
    assert not any(thread.name == "memory-monitor" for thread in threading.enumerate())
    monitor.stop()


# A large file that surely lies on a disk: pages of a file in a tmpfs could not be dropped.
PROGRAM = """
import importlib.util, json, mmap, pathlib
from memory.monitor import HostAlone, Monitor

size = 64 << 20
library = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so"
with library.open("rb") as file, Monitor(1 << 30, HostAlone()) as monitor:
    start = monitor.sample()
    with monitor.phase("mapped"), mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        touched = sum(mapped[i] for i in range(0, size, mmap.PAGESIZE))
        with_map = monitor.sample()
    with monitor.phase("held"):
        held = bytearray(b"x") * size
        monitor.sample()
        del held
    mapped_bytes = with_map.file_bytes - start.file_bytes
    print(json.dumps([start.anon_bytes, mapped_bytes, monitor.phase_peaks, monitor.peak_bytes]))
"""


@pytest.mark.skipif(not has_proc(), reason="/proc does not tell anonymous memory here")
def test_a_real_process_anonymous_and_file_backed_apart():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    anon, mapped, phases, peak = json.loads(done.stdout)
    assert mapped > 60 * MIB
    assert phases["mapped"] - anon < 4 * MIB, "mapped files are not held against the budget"
    assert 64 * MIB <= phases["held"] - anon < 72 * MIB and peak == phases["held"]
