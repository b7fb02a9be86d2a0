"""How many cores may this process use? Torch is not needed to know."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that the system lets this process run on: less than the machine's where `taskset` or a container says so."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
