"""Memory that nobody uses is given back: by schedule, before large phases, under pressure, and after an out-of-memory
error.

Four kinds of it stay behind: reference cycles, free pages inside malloc, Arrow's pool, cached blocks of the device. A
light cleaning takes what is cheap to find, a full one everything. A cache that serves later steps whatever their
shapes, as CUDA's does, is not emptied by schedule: its blocks would be allocated again in the next step. Objects that
live as long as the run are set aside once (`settle`), so that no collection walks through them again. An error's
traceback holds every tensor of the failed step: its frames are cleared before anything can be freed.
Source: Python gc documentation; malloc_trim(3); pyarrow MemoryPool.release_unused.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from devices.malloc import trim_malloc
from memory.processes import usage_of
from memory.system_limits import free_host_bytes
from support.language import say
from support.units import format_size, parse_size

if TYPE_CHECKING:
    from devices.base import Device

LIGHT_STEPS = 50  # Between two light cleanings.
FULL_STEPS = 200  # Between two full ones.
IDLE_SHARE = 0.5  # A light cleaning empties the device's cache where more than this part of it is idle.
YOUNG = 1  # Generations 0 and 1 of Python's garbage collector.
_NEEDED = re.compile(r"tried to allocate ([0-9.]+(?:e[0-9]+)? ?[KMGT]?)", re.IGNORECASE)


class CleanupRecord(NamedTuple):
    """What one cleaning gave back to the system, host and device together.

    Args:
        kind: "light" or "full". reason: "schedule", "epoch", "evaluation", "pressure", ...
    """

    kind: str
    reason: str
    freed_bytes: int


class Cleaner:
    """Cleans by schedule, before large phases, and under pressure.

    Args:
        device: whose cache is emptied.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.total_seconds = 0.0

    def settle(self) -> None:
        """Set everything that exists now aside from later collections. Call once model and data are built."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def after_step(self, step: int) -> CleanupRecord | None:
        """Clean if it is the turn of this step, counted from 1; full where both kinds are due."""
        if step <= 0 or step % LIGHT_STEPS:
            return None
        return self._clean("light" if step % FULL_STEPS else "full", "schedule")

    def before(self, what: str) -> CleanupRecord:
        """Clean fully before a phase that needs much memory, as "epoch" or "evaluation"."""
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
        start = time.perf_counter()
        before = self._held_bytes()
        keeps_cache = reason == "schedule" and self.device.reuses_cache
        if kind == "full":
            clean_all(self.device, keeps_cache)
        else:
            gc.collect(YOUNG)
            _release_arrow()
            if not keeps_cache and self.device.memory_idle_bytes() > IDLE_SHARE * self.device.memory_now_bytes():
                self.device.cleanup()
        freed = max(0, before - self._held_bytes())
        self.total_seconds += time.perf_counter() - start
        return CleanupRecord(kind, reason, freed)

    def _held_bytes(self) -> int:
        return usage_of([os.getpid()]).anon_bytes + self.device.memory_now_bytes()


def clean_all(device: Device, keeps_cache: bool = False) -> None:
    """Give back everything that nobody uses. Order matters: objects first, then the pools that held their memory."""
    gc.collect()
    _release_arrow()
    if not keeps_cache:
        device.cleanup()
    trim_malloc()


def _release_arrow() -> None:
    if "pyarrow" in sys.modules:  # Otherwise no data has been read with it.
        sys.modules["pyarrow"].default_memory_pool().release_unused()


class Shortage(NamedTuple):
    """An out-of-memory error after everything was freed: what it needed (None: it does not say) and what was free, in
    bytes.
    """

    needed_bytes: int | None
    free_bytes: int

    def describe(self, phase: str, batch_size: int, shape: str) -> str:
        """Say in words where it came: phase, micro-batch, its shape ("512 + 114 tokens"; may be empty)."""
        return say(
            "out of memory in phase {phase} with micro-batch {batch}: needed {asked}, {free} free",
            phase=say(phase),
            batch=say("{rows} x {shape}", rows=batch_size, shape=shape) if shape else str(batch_size),
            asked=say("an unknown amount") if self.needed_bytes is None else format_size(self.needed_bytes),
            free=format_size(self.free_bytes),
        )


def free_failed(error: BaseException, device: Device) -> Shortage:
    """Free everything that a failed step holds.

    Args:
        error: for which `device.is_out_of_memory` holds; its frames lose their local variables.
    """
    free = device.memory_free_bytes() if device.is_separate_memory else free_host_bytes()
    needed = None
    for size in _NEEDED.findall(str(error)):
        with suppress(ValueError):
            needed = parse_size(size.rstrip(". "))
    drop_frames(error)
    clean_all(device)
    return Shortage(needed, free)


def drop_frames(error: BaseException) -> None:
    """Release everything that the frames of an error, and of the errors behind it, still hold."""
    errors = [error]
    for each in errors:  # Grows while it is walked.
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
        behind = (each.__cause__, each.__context__)
        errors += [other for other in behind if other is not None and other not in errors]
