"""What happens after an out-of-memory error? Everything is freed, and what was asked for and was there is put in words.

Idea: the error's traceback holds every tensor of the failed step, so nothing can be freed before its frames are
cleared. What is changed afterwards is decided by whoever plans: the same rows are run again in a smaller way, so that
the loss curve does not notice.
Source: the automatic micro-batching of Composer; the pitfalls of retry decorators that change the effective batch.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from language import say
from memory.cleanup import clean_all
from memory.observe.budget import free_host_bytes
from units import format_size, parse_size

if TYPE_CHECKING:
    from devices.base import Device

_NEEDED = re.compile(r"tried to allocate ([0-9.]+(?:e[0-9]+)?) ?([KMGT]i?B|bytes)?", re.IGNORECASE)


@dataclass(frozen=True)
class Shortage:
    """An out-of-memory error after everything was freed: what it asked for (None: unsaid) and what was free, in bytes."""

    needed_bytes: int | None
    free_bytes: int

    def describe(self, phase: str, batch_size: int, shape: str) -> str:
        """Say in words where it came: phase, micro-batch, its shape ("512 + 114 tokens"; may be empty)."""
        batch = f"{batch_size} x {shape}" if shape else str(batch_size)
        unsaid = self.needed_bytes is None
        asked = say("an amount that the error does not name") if unsaid else format_size(self.needed_bytes or 0)
        return say(
            "out of memory in phase {phase} with micro-batch {batch}: needed {asked}, {free} were free",
            phase=phase, batch=batch, asked=asked, free=format_size(self.free_bytes),
        )  # fmt: skip


def free_failed(error: BaseException, device: Device) -> Shortage:
    """Free everything that a failed step holds.

    Args:
        error: for which `device.is_out_of_memory` holds; its frames lose their local variables.
    """
    free = device.memory_free_bytes() if device.is_separate_memory else free_host_bytes()
    shortage = Shortage(needed_bytes(error), free)
    drop_frames(error)
    clean_all(device)
    return shortage


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


def needed_bytes(error: BaseException) -> int | None:
    """Read from an error how much was asked for; None where it does not say."""
    match = _NEEDED.search(str(error))
    if match is None:
        return None
    number, unit = match.group(1).rstrip("."), (match.group(2) or "bytes").lower()
    try:
        return parse_size(number if unit == "bytes" else f"{number}{unit}")
    except ValueError:
        return None
