"""When is memory that nobody uses given back, and what does that cost?

Idea: four kinds of memory stay behind although nothing uses them: reference cycles, free pages inside malloc, Arrow's
pool, cached blocks of the device. A light cleaning takes what is cheap to find, a full one everything. Objects that
live as long as the run are set aside once (`settle`), so that no collection walks through them again.
Source: Python gc documentation; malloc_trim(3); pyarrow MemoryPool.release_unused.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devices.malloc import trim_malloc
from memory.observe.processes import process_usage

if TYPE_CHECKING:
    from devices.base import Device

IDLE_SHARE = 0.5  # a light cleaning empties the device's cache when more than this part of it is idle
YOUNG = 1  # generations 0 and 1


@dataclass(frozen=True)
class CleanupRecord:
    """What one cleaning gave back to the system and took in time."""

    kind: str  # "light" or "full"
    reason: str  # "schedule", "epoch", "evaluation", "pressure"
    freed_bytes: int  # host and device together
    seconds: float


class Cleaner:
    """Cleans by schedule, before large phases, and under pressure.

    Args:
        device: whose cache is emptied.
        light_steps, full_steps: steps between two cleanings of each kind, 1 or more.
    """

    def __init__(self, device: Device, light_steps: int = 50, full_steps: int = 200) -> None:
        self.device, self.light_steps, self.full_steps = device, light_steps, full_steps
        self.total_seconds = 0.0
        self.counts = {"light": 0, "full": 0}

    def settle(self) -> None:
        """Set everything that exists now aside from later collections. Call once model and data are built."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def after_step(self, step: int) -> CleanupRecord | None:
        """Clean if it is the turn of this step, counted from 1; full where both kinds are due."""
        if step > 0 and step % self.full_steps == 0:
            return self._clean("full", "schedule")
        if step > 0 and step % self.light_steps == 0:
            return self._clean("light", "schedule")
        return None

    def before(self, what: str) -> CleanupRecord:
        """Clean fully before a phase that needs room: "epoch" or "evaluation"."""
        return self._clean("full", what)

    def under_pressure(self) -> CleanupRecord:
        """Clean fully at once, objects that were set aside included."""
        has_settled = gc.get_freeze_count() > 0
        gc.unfreeze()
        record = self._clean("full", "pressure")
        if has_settled:
            gc.freeze()
        return record

    def _clean(self, kind: str, reason: str) -> CleanupRecord:
        start, before = time.perf_counter(), self._held_bytes()
        if kind == "full":
            clean_all(self.device)
        else:
            gc.collect(YOUNG)
            release_arrow()
            if self.device.memory_idle_bytes() > IDLE_SHARE * self.device.memory_now_bytes():
                self.device.cleanup()
        freed = max(0, before - self._held_bytes())
        seconds = time.perf_counter() - start
        self.total_seconds += seconds
        self.counts[kind] += 1
        return CleanupRecord(kind, reason, freed, seconds)

    def _held_bytes(self) -> int:
        usage = process_usage(os.getpid())
        return (usage.anon_bytes if usage else 0) + self.device.memory_now_bytes()


def clean_all(device: Device) -> None:
    """Give back everything that nobody uses. Order matters: objects first, then the pools that held their memory."""
    gc.collect()
    release_arrow()
    device.cleanup()
    trim_malloc()


def release_arrow() -> None:
    """Let Arrow return its free memory; nothing to do where no data has been read with it."""
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is not None:
        pyarrow.default_memory_pool().release_unused()
