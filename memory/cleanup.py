"""Memory that nobody uses is given back: by schedule, before large phases, under pressure, and after an out-of-memory error.

Four kinds of it stay behind: reference cycles, free pages inside malloc, Arrow's pool, cached blocks of the device. A light
cleaning takes what is cheap to find, a full one everything. A cache that serves later steps whatever their shapes, as CUDA's
does, is not emptied by schedule: its blocks would be allocated again in the next step. Objects that live as long as the run are set aside once
(`settle`), so that no collection walks through them again. An error's traceback holds every tensor of the failed step: its
frames are cleared before anything can be freed.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devices.malloc import trim_malloc
from language import say
from memory.processes import usage_of
from memory.system_limits import free_host_bytes
from units import format_size, parse_size

if TYPE_CHECKING:
    from devices.base import Device

LIGHT_STEPS, FULL_STEPS = 50, 200  # between two cleanings of each kind
IDLE_SHARE = 0.5  # a light cleaning empties the device's cache when more than this part of it is idle
YOUNG = 1  # generations 0 and 1
_NEEDED = re.compile(r"tried to allocate ([0-9.]+(?:e[0-9]+)?) ?([KMGT]i?B|bytes)?", re.IGNORECASE)


@dataclass(frozen=True)
class CleanupRecord:
    """What one cleaning gave back to the system, host and device together."""

    kind: str  # "light" or "full"
    reason: str  # "schedule", "epoch", "evaluation", "pressure", ...
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
        if step > 0 and step % FULL_STEPS == 0:
            return self._clean("full", "schedule")
        if step > 0 and step % LIGHT_STEPS == 0:
            return self._clean("light", "schedule")
        return None

    def before(self, what: str) -> CleanupRecord:
        """Clean fully before a phase that needs room, as "epoch" or "evaluation"."""
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
    pyarrow = sys.modules.get("pyarrow")  # nothing to do where no data has been read with it
    if pyarrow is not None:
        pyarrow.default_memory_pool().release_unused()


@dataclass(frozen=True)
class Shortage:
    """An out-of-memory error after everything was freed: what it asked for (None: unsaid) and what was free, in bytes."""

    needed_bytes: int | None
    free_bytes: int

    def describe(self, phase: str, batch_size: int, shape: str) -> str:
        """Say in words where it came: phase, micro-batch, its shape ("512 + 114 tokens"; may be empty)."""
        batch = say("{rows} x {shape}", rows=batch_size, shape=shape) if shape else str(batch_size)
        unsaid = self.needed_bytes is None
        asked = say("an unknown amount") if unsaid else format_size(self.needed_bytes or 0)
        return say(
            "out of memory in phase {phase} with micro-batch {batch}: needed {asked}, {free} free",
            phase=say(phase), batch=batch, asked=asked, free=format_size(self.free_bytes),
        )  # fmt: skip


def free_failed(error: BaseException, device: Device) -> Shortage:
    """Free everything that a failed step holds.

    Args:
        error: for which `device.is_out_of_memory` holds; its frames lose their local variables.
    """
    free = device.memory_free_bytes() if device.is_separate_memory else free_host_bytes()
    match, needed = _NEEDED.search(str(error)), None
    if match is not None:
        number, unit = match.group(1).rstrip("."), (match.group(2) or "bytes").lower()
        with suppress(ValueError):
            needed = parse_size(number if unit == "bytes" else f"{number}{unit}")
    drop_frames(error)
    clean_all(device)
    return Shortage(needed, free)


def drop_frames(error: BaseException) -> None:
    """Release everything that the frames of an error, and of the errors behind it, still hold."""
    links, seen = [error], set()
    for link in links:  # grows while it is walked
        if id(link) in seen:
            continue
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        links += [after for after in (link.__cause__, link.__context__) if after is not None]
