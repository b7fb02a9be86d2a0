"""The run's memory now, and its peak, in all and phase by phase.

A thread samples the process tree a few times a second, the trainer adds samples at its own boundaries (one after each
step, and around an evaluation), and both feed the same peaks. What is allocated and freed between two samples is known
from the kernel's high water mark of this process, which is read and never reset. Only anonymous memory counts against
the budget. The cost of sampling is counted too, so that it can be shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memory.processes import ProcessTree
from settings.errors import OverBudget
from support.language import Message, join, say
from support.units import format_size

if TYPE_CHECKING:
    from devices.base import Device

LINE_MARK = "内存监控"  # Users grep for it.


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in bytes.

    Args:
        host_bytes: what counts against the host's budget.
        plan_bytes: what is held of the memory that the plan is about: the device's where it has its own, else the
            host's.
    """

    phase: str
    anon_bytes: int
    file_bytes: int
    device_bytes: int
    host_bytes: int
    plan_bytes: int


class HostAlone:
    """Stands for the device as long as none is chosen: it holds no memory."""

    name = "none"
    is_separate_memory = False

    def memory_now_bytes(self) -> int:
        """As of `devices.base.Device`."""
        return 0

    memory_idle_bytes = memory_peak_bytes = memory_total_bytes = pinned_bytes = memory_now_bytes


class Monitor:
    """Samples memory as a context manager, in a thread of its own, until `stop` or the end of the context.

    Args:
        budget_bytes: host budget of this rank, above 0.
        device: whose memory is sampled beside the host's; see `watch_device`.
        interval_seconds: time between two samples of the thread, above 0.
        device_budget_bytes: budget on a device with memory of its own; None: nothing counts against it.
        processes: whose memory is meant; this process and its children by default.
    """

    def __init__(
        self,
        budget_bytes: int,
        device: Device | HostAlone,
        interval_seconds: float = 0.25,
        *,
        device_budget_bytes: int | None = None,
        processes: ProcessTree | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.device_budget_bytes = device_budget_bytes
        self.device: Device | HostAlone = device
        self.peak_bytes = 0
        self.phase_peaks: dict[str, int] = {}
        # These two hold what counts against the budget as it is now, see `watch`.
        self.counted_peak_bytes = 0
        self.counted_phase_peaks: dict[str, int] = {}
        self.cost_seconds = 0.0  # Processor time that sampling took.
        self._interval_seconds = interval_seconds
        self._start = time.monotonic()
        self._processes = processes or ProcessTree()
        self._last = Sample("start", 0, 0, 0, 0, 0)
        self._phase = "start"
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, budget_bytes: int, from_now: bool = False) -> None:
        """Hold memory against another host budget from now on.

        Args:
            from_now: the machine has less by now: what was held when it had more does not count against the new budget.
        """
        with self._lock:
            self.budget_bytes = budget_bytes
            self.counted_peak_bytes = 0 if from_now else self.peak_bytes
            self.counted_phase_peaks = {} if from_now else dict(self.phase_peaks)

    def watch_device(self, device: Device, budget_bytes: int | None) -> None:
        """Sample this device from now on, which was not known before; its budget as of `device_budget_bytes`."""
        with self._lock:
            self.device = device
            self.device_budget_bytes = budget_bytes

    def __enter__(self) -> Monitor:
        self._ended.clear()
        self._thread = threading.Thread(target=self._sample_until_ended, name="memory-monitor", daemon=True)
        self._thread.start()
        self.sample()
        return self

    def _sample_until_ended(self) -> None:
        while not self._ended.wait(self._interval_seconds):
            self.sample()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread after a last sample; the figures stay readable."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self.sample()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count everything until the end of the block to this phase, e.g. "train" or "evaluation"."""
        before = self._phase
        self._phase = name
        self.sample()
        try:
            yield
        finally:
            self.sample()
            self._phase = before

    def sample(self, phase: str | None = None) -> Sample:
        """Take one sample now, for the phase that runs or for another one."""
        with self._lock:
            start = time.thread_time()
            usage = self._processes.usage()
            pinned = self.device.pinned_bytes()  # RAM that the system does not call anonymous.
            anonymous = usage.anon_bytes + pinned
            on_device = int(self.device.memory_now_bytes())
            # Where both share the RAM, one budget holds both.
            shared = 0 if self.device.is_separate_memory else on_device
            planned = anonymous + shared
            if self.device.is_separate_memory and self.device_budget_bytes:
                # Idle blocks are the backend's to use again; only what tensors hold presses.
                planned = on_device - self.device.memory_idle_bytes()
            phase = phase or self._phase
            mapped = max(0, usage.file_bytes - pinned)
            self._last = Sample(phase, anonymous, mapped, on_device, anonymous + shared, planned)
            highest = max(anonymous, usage.peak_bytes) + shared
            self.peak_bytes = max(self.peak_bytes, highest)
            self.counted_peak_bytes = max(self.counted_peak_bytes, highest)
            for peaks in (self.phase_peaks, self.counted_phase_peaks):
                peaks[phase] = max(peaks.get(phase, 0), highest)
            self.cost_seconds += time.thread_time() - start
            return self._last

    def watched_seconds(self) -> float:
        """Seconds since it was made: beginning, evaluations and saving are in them as well as the steps."""
        return time.monotonic() - self._start

    def pressure(self) -> float:
        """Share of the budget in use at the last sample; above 1 it is overrun. Host or device, whichever is higher."""
        return max(self._last.host_bytes / self.budget_bytes, self.plan_pressure())

    def plan_pressure(self) -> float:
        """The same of the memory that the plan is about: the device's where it has its own, else the host's."""
        budget = self.device_budget_bytes if self.device.is_separate_memory else None
        return self.plan_bytes() / (budget or self.budget_bytes)

    def plan_bytes(self) -> int:
        """What was held at the last sample of the memory that the plan is about."""
        return self._last.plan_bytes

    def record(self, step: int, phase: str | None = None) -> dict[str, Any]:
        """Take a sample and give it the fields of a `memory` event in metrics.jsonl."""
        sample = self.sample(phase)
        return {
            "step": step,
            "phase": sample.phase,
            "anon_bytes": sample.anon_bytes,
            "file_bytes": sample.file_bytes,
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.budget_bytes,
            "device_bytes": sample.device_bytes,
            "device_peak_bytes": int(self.device.memory_peak_bytes()),
        }

    def latest(self) -> dict[str, Any]:
        """Phase and memory of the last sample; takes none."""
        last = self._last
        return {"phase": last.phase, "anon_bytes": last.anon_bytes, "device_bytes": last.device_bytes}

    def line(self, step: int) -> Message:
        """The last sample as one line, in the user's language."""
        last = self._last
        line = say(
            "{mark} step {step} | phase {phase} | anonymous {anonymous} | file-backed {file} | peak {peak} | budget "
            "{budget} ({share} in use)",
            mark=LINE_MARK,
            step=step,
            phase=say(last.phase),
            anonymous=format_size(last.anon_bytes),
            file=format_size(last.file_bytes),
            peak=format_size(self.peak_bytes),
            budget=format_size(self.budget_bytes),
            share=f"{last.anon_bytes / self.budget_bytes:.0%}",
        )
        if not self.device.memory_total_bytes():
            return line
        return say(
            "{line} | {device} {size} (peak {peak})",
            line=line,
            device=self.device.name,
            size=format_size(last.device_bytes),
            peak=format_size(self.device.memory_peak_bytes()),
        )


@contextmanager
def watched(monitor: Monitor, *changes: str) -> Iterator[None]:
    """Measure until the context ends.

    Args:
        changes: flags that would take less.
    Raises:
        OverBudget: everything is done, and took more than the budget.
    """
    with monitor:
        yield
    if monitor.peak_bytes > monitor.budget_bytes:
        raise OverBudget(
            "--memory_budget = {budget}, was exceeded: the peak was {peak}; {changes}",
            budget=format_size(monitor.budget_bytes),
            peak=format_size(monitor.peak_bytes),
            changes=join(", ", [say("raise it"), *changes]),
        )
