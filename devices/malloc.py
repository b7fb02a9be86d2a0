"""glibc's malloc, kept small or fast by mallopt and malloc_trim through ctypes; does not import torch.

Idea: every thread of a process gets an arena of its own, and freed memory stays in it. Few arenas and low thresholds
return freed tensors to the system at once (smaller); high thresholds keep their pages for the next step (faster).
Source: mallopt(3), malloc_trim(3).
"""

from __future__ import annotations

import ctypes
from functools import cache

from limits import HEAP_BELOW, UNTRIMMED_HEAP_BELOW

# numbers of malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8
ALWAYS = {M_TOP_PAD: 128 * 1024, M_MMAP_MAX: 65536}  # as glibc has them where nobody says otherwise
# "fast" keeps small tensors in the heap, which a step trims; large ones are mapped, so that what they took is given back.
# "untrimmed" keeps more in the heap, and its pages for the next step
TUNINGS: dict[str, dict[int, int]] = {
    "small": {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: 128 * 1024, M_TRIM_THRESHOLD: 128 * 1024},
    "fast": {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: HEAP_BELOW, M_TRIM_THRESHOLD: 8 * 1024**2},
    "untrimmed": {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: UNTRIMMED_HEAP_BELOW, M_TRIM_THRESHOLD: 2**31 - 1},
}


@cache
def _libc() -> ctypes.CDLL | None:
    """The C library of this process, if it is glibc."""
    try:
        libc = ctypes.CDLL(None)
        if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") and hasattr(libc, "gnu_get_libc_version")):
            return None
    except (OSError, TypeError):  # Windows has no library of the process
        return None
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    return libc


def tune_malloc(tuning: str) -> bool:
    """Set malloc's thresholds for this process. Best called before much is allocated.

    They go before MALLOC_* and glibc.malloc tunables of the environment, which many container images set: a plan counts on
    what it has chosen, and the budget that it keeps is what the user asks for.

    Args:
        tuning: of `TUNINGS`: "small" (least memory), "fast" or "untrimmed" (the fastest).
    Returns:
        whether the setting took effect: False without glibc, or where malloc refused.
    """
    libc = _libc()
    return libc is not None and all(
        [libc.mallopt(option, value) == 1 for option, value in {**ALWAYS, **TUNINGS[tuning]}.items()]
    )


def trim_malloc() -> bool:
    """Return malloc's free pages, of all arenas, to the system. Returns whether there was something to return."""
    libc = _libc()
    return libc is not None and libc.malloc_trim(0) == 1
