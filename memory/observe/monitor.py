"""The run's memory now, and its peak, in all and phase by phase.

Idea: a thread samples the process tree a few times a second, the trainer adds samples at its own boundaries (after a
step, before an evaluation), and both feed the same peaks. What is allocated and freed between two samples is told by the
kernel's high water mark of this process, which is read and never reset. Only anonymous memory is held against the
budget. The cost of sampling is counted too, so that it can be shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from language import Message, say
from memory.observe.high_water import read_marks
from memory.observe.processes import ProcessTree, has_proc
from units import format_size

if TYPE_CHECKING:
    from devices.base import Device

LINE_MARK = "内存监控"  # users grep for it


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in bytes."""

    phase: str
    anon_bytes: int
    file_bytes: int
    device_bytes: int


class HostAlone:
    """Stands for the device as long as none is chosen: nothing lies on any."""

    name, is_separate_memory = "none", False

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
        device_budget_bytes: budget on a device with memory of its own; None: none is held against it.
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
        self.budget_bytes, self.device_budget_bytes = budget_bytes, device_budget_bytes
        self.device: Device | HostAlone = device
        self.interval_seconds = interval_seconds
        self.peak_bytes = self.counted_peak_bytes = 0  # in all, and what counts against the budget
        self.counted_phase = ""  # in which the latter was
        self.phase_peaks: dict[str, int] = {}  # phase -> most anonymous memory in it
        self.cost_seconds = 0.0  # processor time that sampling took
        self._made = time.monotonic()
        self._processes = processes or ProcessTree()
        self._marks = read_marks() if processes is None and has_proc() else None  # of this process alone
        self._phase = "start"
        self._last: Sample | None = None
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, budget_bytes: int, from_now: bool = False) -> None:
        """Hold memory against another host budget from now on.

        Args:
            from_now: the machine has less by now: what was held when it had more is not held against the new budget.
        """
        with self._lock:
            self.budget_bytes = budget_bytes
            self.counted_peak_bytes = 0 if from_now else self.peak_bytes

    def watch_device(self, device: Device, budget_bytes: int | None) -> None:
        """Sample this device from now on, which was not known before; its budget as of `device_budget_bytes`."""
        with self._lock:
            self.device, self.device_budget_bytes = device, budget_bytes

    def __enter__(self) -> Monitor:
        self._ended.clear()
        self._thread = threading.Thread(target=self._watch, name="memory-monitor", daemon=True)
        self._thread.start()
        self.sample()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread after a last sample; the figures stay readable."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.set()
            thread.join()
            self.sample()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count everything until the end of the block to this phase, e.g. "train" or "evaluation"."""
        with self._lock:
            before, self._phase = self._phase, name
        self.sample()
        try:
            yield
        finally:
            self.sample()
            with self._lock:
                self._phase = before

    def sample(self, phase: str | None = None) -> Sample:
        """Take one sample now, for the phase that runs or for another one."""
        with self._lock:
            start = time.thread_time()
            usage, pinned = self._processes.usage(), self.device.pinned_bytes()
            sample = Sample(
                phase or self._phase,
                usage.anon_bytes + pinned,
                max(0, usage.file_bytes - pinned),
                int(self.device.memory_now_bytes()),
            )
            self._last = sample
            # where both share the RAM, one budget holds both
            beside = 0 if self.device.is_separate_memory else sample.device_bytes
            highest = max(sample.anon_bytes, self._new_mark()) + beside
            if highest > self.counted_peak_bytes:
                self.counted_phase = sample.phase
            self.peak_bytes = max(self.peak_bytes, highest)
            self.counted_peak_bytes = max(self.counted_peak_bytes, highest)
            self.phase_peaks[sample.phase] = max(self.phase_peaks.get(sample.phase, 0), highest)
            self.cost_seconds += time.thread_time() - start
            return sample

    def _new_mark(self) -> int:
        """What the high water mark tells of the time since the last sample; 0 where it has not risen."""
        if self._marks is None:
            return 0
        before, self._marks = self._marks, read_marks()
        mapped = max(before.file_bytes, self._marks.file_bytes)  # a file may have been unmapped after the peak
        return self._marks.highest_bytes - mapped if self._marks.highest_bytes > before.highest_bytes else 0

    def watched_seconds(self) -> float:
        """How long it has been there: beginning, evaluations and saving are in it as well as the steps."""
        return time.monotonic() - self._made

    def pressure(self) -> float:
        """Share of the budget in use at the last sample; above 1 it is overrun. Host or device, whichever is higher."""
        share = self.plan_pressure()
        return max(share, self._latest().anon_bytes / self.budget_bytes) if self.device.is_separate_memory else share

    def plan_pressure(self) -> float:
        """The same of the memory that the plan is about: the device's where it has its own, else the host's."""
        last = self._latest()
        if self.device.is_separate_memory and self.device_budget_bytes:
            # Idle blocks are the backend's to use again; only what tensors hold presses.
            return (last.device_bytes - self.device.memory_idle_bytes()) / self.device_budget_bytes
        # Where both share the RAM, one budget holds both.
        host = last.anon_bytes + (0 if self.device.is_separate_memory else last.device_bytes)
        return host / self.budget_bytes

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
        if (last := self._last) is None:
            return {}
        return {"phase": last.phase, "anon_bytes": last.anon_bytes, "device_bytes": last.device_bytes}

    def line(self, step: int) -> Message:
        """The last sample as one line, in the user's language."""
        last = self._latest()
        line = say(
            "{mark} step {step} | phase {phase} | anonymous {anonymous} | file-backed {file} | peak {peak} | budget {budget} ({share} in use)",
            mark=LINE_MARK, step=step, phase=say(last.phase), anonymous=format_size(last.anon_bytes), file=format_size(last.file_bytes),
            peak=format_size(self.peak_bytes), budget=format_size(self.budget_bytes), share=f"{last.anon_bytes / self.budget_bytes:.0%}",
        )  # fmt: skip
        if not self.device.memory_total_bytes():
            return line
        return say(
            "{line} | {device} {size} (peak {peak})", line=line, device=self.device.name, size=format_size(last.device_bytes),
            peak=format_size(self.device.memory_peak_bytes()),
        )  # fmt: skip

    def _latest(self) -> Sample:
        return self._last or self.sample()

    def _watch(self) -> None:
        while not self._ended.wait(self.interval_seconds):
            self.sample()
