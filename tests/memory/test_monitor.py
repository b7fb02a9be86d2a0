"""Peaks of a run, in all and by phase, of host and device."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memory.monitor import Monitor, watched
from memory.processes import ProcessTree, Usage, has_proc
from settings.errors import OverBudget
from support.units import MIB
from tests.fake_device import FakeDevice
from tests.memory.fake_machine import ME, FakeMachine


class Scripted(ProcessTree):
    """A process tree whose anonymous memory follows a script, in MiB; the last value stays."""

    def __init__(self, *anonymous: int) -> None:
        super().__init__()
        self.script = list(anonymous)
        self.called = threading.Semaphore(0)

    def usage(self) -> Usage:
        value = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.called.release()
        return Usage(value * MIB, 7 * MIB)


def monitor_of(*anonymous: int, device: FakeDevice | None = None, device_budget: int | None = None) -> Monitor:
    return Monitor(
        1000 * MIB,
        device or FakeDevice(),
        device_budget_bytes=device_budget,
        processes=Scripted(*anonymous),
    )


def test_pinned_ram_and_memory_shared_with_a_device_count_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeDevice(900 * MIB)
    monkeypatch.setattr(card, "pinned_bytes", lambda: 200 * MIB)
    monitor = monitor_of(300, device=card)
    assert monitor.sample().anon_bytes == monitor.peak_bytes == 500 * MIB and monitor.pressure() == pytest.approx(0.5)
    device = FakeDevice(900 * MIB, separate=False)
    device.allocate(400 * MIB)
    monitor = monitor_of(300, device=device)
    assert (monitor.sample().anon_bytes, monitor.peak_bytes) == (300 * MIB, 700 * MIB)
    assert monitor.pressure() == monitor.plan_pressure() == pytest.approx(0.7)


def test_what_lived_between_two_samples_is_known_from_the_kernels_mark(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.process(ME, parent=50, anon=300 * MIB, file=50 * MIB, highest=800 * MIB)
    monitor = Monitor(1000 * MIB, FakeDevice(), processes=ProcessTree(ME, tmp_path))
    monitor.sample("load")
    assert monitor.peak_bytes == 300 * MIB, "what was held before anybody watched is not the run's"
    for phase, mebibytes in (("train", 200), ("save", 250)):
        machine.process(ME, parent=50, anon=mebibytes * MIB, file=60 * MIB, highest=900 * MIB)
        monitor.sample(phase)
    assert monitor.phase_peaks == {"load": 300 * MIB, "train": 840 * MIB, "save": 250 * MIB}


def test_a_new_budget_counts_what_was_held_unless_the_machine_has_less_since() -> None:
    monitor = monitor_of(300, 100)
    monitor.sample("load")
    for is_from_now, peaks in ((False, (300 * MIB, {"load": 300 * MIB})), (True, (0, {}))):
        monitor.watch(500 * MIB, *[True] * is_from_now)
        assert (monitor.counted_peak_bytes, monitor.counted_phase_peaks) == peaks
    monitor.sample("train")
    assert (monitor.counted_peak_bytes, monitor.peak_bytes) == (100 * MIB, 300 * MIB)
    assert monitor.pressure() == pytest.approx(0.2)


def test_work_that_took_more_than_its_budget_ends_in_a_refusal() -> None:
    with watched(monitor_of(1000)):
        pass
    with pytest.raises(OverBudget, match="memory_budget"), watched(monitor_of(1001)):
        pass


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
def test_a_real_process_anonymous_and_file_backed_apart() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    anonymous, mapped, phases, peak = json.loads(done.stdout)
    assert mapped > 60 * MIB
    assert phases["mapped"] - anonymous < 4 * MIB, "mapped files are not held against the budget"
    assert 64 * MIB <= phases["held"] - anonymous < 72 * MIB and peak == phases["held"]
