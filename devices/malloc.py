"""glibc's malloc, kept small or fast by mallopt and malloc_trim through ctypes; does not import torch.

By default each thread allocates from an arena of its own, where freed memory stays. With one arena and low thresholds,
freed tensors go back to the system at once (smaller); with high thresholds their pages serve the next step (faster).
Source: mallopt(3), malloc_trim(3), mallinfo(3), proc_pid_statm(5).
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from devices.sizes import HEAP_BELOW, HEAP_EXCESS, UNTRIMMED_HEAP_BELOW

# Numbers of malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
M_ARENA_MAX = -8
# Set with every tuning, to glibc's own defaults, since the environment may have changed them:
COMMON_OPTIONS = {M_TOP_PAD: 128 * 1024, M_MMAP_MAX: 65536}
# "fast" keeps small tensors in the heap, which is trimmed before each pass; large ones are mapped one by one, and their
# memory goes back to the system when they are freed. "untrimmed" keeps larger ones in the heap too, and its pages for
# the next step.
TUNINGS: dict[str, dict[int, int]] = {
    "small": {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: 128 * 1024, M_TRIM_THRESHOLD: 128 * 1024},
    "fast": {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: HEAP_BELOW, M_TRIM_THRESHOLD: 8 * 1024**2},
    "untrimmed": {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: UNTRIMMED_HEAP_BELOW, M_TRIM_THRESHOLD: 2**31 - 1},
}

MALLINFO2 = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: statistics summed over all arenas."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO2]


@cache
def _libc() -> ctypes.CDLL | None:
    """The C library of this process, if it is glibc."""
    try:
        libc = ctypes.CDLL(None)
        if not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") and hasattr(libc, "gnu_get_libc_version")):
            return None
    except (OSError, TypeError):  # Windows has no library of the process.
        return None
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    if hasattr(libc, "mallinfo2"):  # It came with glibc 2.33.
        libc.mallinfo2.restype = _Mallinfo
    return libc


def tune_malloc(tuning: str) -> bool:
    """Set malloc's thresholds for this process. Best called before much is allocated.

    They override MALLOC_* and the glibc.malloc tunables of the environment, which many container images set: the plan
    that keeps the user's budget was made for this tuning.

    Args:
        tuning: a key of `TUNINGS`: "small" (least memory), "fast" or "untrimmed" (the fastest).
    Returns:
        whether the setting took effect: False without glibc, or where malloc refused.
    """
    libc = _libc()
    return libc is not None and all(
        [libc.mallopt(option, value) == 1 for option, value in {**COMMON_OPTIONS, **TUNINGS[tuning]}.items()]
    )


def trim_malloc() -> bool:
    """Give malloc's free pages, of all arenas, back to the system. Returns whether there were any."""
    libc = _libc()
    return libc is not None and libc.malloc_trim(0) == 1


class HeapTrimmer:
    """Bounds what malloc holds beyond the tensors in use; the plan counts on it (`memory.estimate.peaks`).

    Without it the heap would grow from micro-batch to micro-batch: a gap left by a tensor of one length does not fit
    the tensors of another.

    Args:
        tuning: a key of `TUNINGS`. "fast" gives all free memory back before each pass; "untrimmed" keeps as much as was
            ever in use; "small" leaves nothing to trim.
    """

    def __init__(self, tuning: str) -> None:
        self.share, self.least_bytes = HEAP_EXCESS.get(tuning, (0.0, 0))
        self.keeps_pages = tuning == "untrimmed"
        self._libc = _libc() if tuning in HEAP_EXCESS else None
        self._baseline = 0  # bytes in use before any pass, such as the weights
        self._counted = 0  # bytes that count as in use: with "untrimmed" the most so far, otherwise the present ones
        self._not_malloc = 0  # resident bytes beyond those in use right after a trim, which malloc does not hold
        if self._libc is not None:
            self._baseline = self._counted = sum(_used_and_mapped(self._libc))
            self._trim(self._counted)

    def trim(self) -> None:
        """Give all free memory back, unless this tuning keeps it. Called before a pass, and between its stacks."""
        if self._libc is not None and not self.keeps_pages:
            self._trim(sum(_used_and_mapped(self._libc)))

    def used_bytes(self) -> int:
        """Bytes in use in the heap; tensors that are mapped one by one are not counted."""
        return 0 if self._libc is None else _used_and_mapped(self._libc)[0]

    def trim_excess(self, used_before: int) -> None:
        """Give free memory back if the heap holds more of it than this tuning allows; takes some microseconds.

        Args:
            used_before: `used_bytes()` before a block built or freed its graph. As many bytes as that took may stay
                free, since the next block needs as much. With the present `used_bytes()`, no bytes may stay free for
                that reason.
        """
        if self._libc is None:
            return
        in_heap, mapped = _used_and_mapped(self._libc)
        used = in_heap + mapped
        self._counted = max(self._counted, used) if self.keeps_pages else used
        free = _resident_bytes() - self._not_malloc - self._counted
        allowed = abs(in_heap - used_before) + max(self.least_bytes, self.share * (self._counted - self._baseline))
        if free > allowed:
            self._trim(used)

    def _trim(self, used: int) -> None:
        trim_malloc()
        self._not_malloc = _resident_bytes() - used


def _used_and_mapped(libc: ctypes.CDLL) -> tuple[int, int]:
    """Bytes in use in the heap, and in mappings of one tensor each.

    Both are 0 before glibc 2.33, which has no mallinfo2. `trim_excess` then compares resident memory
    with that of the last trim.
    """
    if not hasattr(libc, "mallinfo2"):
        return 0, 0
    facts = libc.mallinfo2()
    return facts.uordblks, facts.hblkhd


def _resident_bytes() -> int:
    """Resident bytes of this process that belong to no file (RSS without shared pages)."""
    resident, shared = map(int, Path("/proc/self/statm").read_bytes().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
