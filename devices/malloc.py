"""glibc's malloc, kept small or fast by mallopt and malloc_trim through ctypes; does not import torch.

Idea: every thread of a process gets an arena of its own, and freed memory stays in it. Few arenas and low thresholds
return freed tensors to the system at once (smaller); high thresholds keep their pages for the next step (faster).
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
ALWAYS = {M_TOP_PAD: 128 * 1024, M_MMAP_MAX: 65536}  # These are the defaults of glibc.
# "fast" keeps small tensors in the heap, which each pass trims; large ones are mapped, so that what they took is given
# back. "untrimmed" keeps more in the heap, and its pages for the next step.
TUNINGS: dict[str, dict[int, int]] = {
    "small": {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: 128 * 1024, M_TRIM_THRESHOLD: 128 * 1024},
    "fast": {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: HEAP_BELOW, M_TRIM_THRESHOLD: 8 * 1024**2},
    "untrimmed": {M_ARENA_MAX: 1, M_MMAP_THRESHOLD: UNTRIMMED_HEAP_BELOW, M_TRIM_THRESHOLD: 2**31 - 1},
}


MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, of all arenas."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


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

    They go before MALLOC_* and glibc.malloc tunables of the environment, which many container images set: a plan counts
    on what it has chosen, and the budget that it keeps is what the user asks for.

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


class HeapTrimmer:
    """Bounds what malloc holds beyond the tensors in use; the plan counts on it (`memory.estimate.peaks`).

    Idea: the gaps that tensors of one length leave do not fit those of another, and would add up over micro-batches and
    steps.

    Args:
        tuning: of `TUNINGS`. "fast" returns all that is free before each pass; "untrimmed" keeps what the largest has
            had in use; with "small" there is nothing to return.
    """

    def __init__(self, tuning: str) -> None:
        self.share, self.least_bytes = HEAP_EXCESS.get(tuning, (0.0, 0))
        self.keeps = tuning == "untrimmed"
        self._libc = _libc() if tuning in HEAP_EXCESS else None
        self._lasting = 0  # Bytes in use before any pass.
        self._most = 0  # The most bytes that were in use.
        self._foreign = 0  # Resident bytes that are not malloc's.
        if self._libc is not None:
            self._lasting = self._most = sum(_used_and_mapped(self._libc))
            self._trim(self._most)

    def trim(self) -> None:
        """Return all that is free, unless it is kept: before a pass, and between its stacks."""
        if self._libc is not None and not self.keeps:
            self._trim(sum(_used_and_mapped(self._libc)))

    def used_bytes(self) -> int:
        """What is in use of the heap, without what is mapped by itself."""
        return 0 if self._libc is None else _used_and_mapped(self._libc)[0]

    def trim_excess(self, before: int) -> None:
        """Return what is free where it is too much beside what is in use; takes some microseconds.

        Args:
            before: `used_bytes` before a block has made its graph, or freed it: as much may be free, for the next will
                need it; where there was none, those of now.
        """
        if self._libc is None:
            return
        in_heap, mapped = _used_and_mapped(self._libc)
        used = in_heap + mapped
        self._most = max(self._most, used) if self.keeps else used
        excess = _resident_bytes() - self._foreign - self._most
        if excess > abs(in_heap - before) + max(self.least_bytes, self.share * (self._most - self._lasting)):
            self._trim(used)

    def _trim(self, used: int) -> None:
        trim_malloc()
        self._foreign = _resident_bytes() - used


def _used_and_mapped(libc: ctypes.CDLL) -> tuple[int, int]:
    """Bytes in use in the heap, and mapped by themselves; 0 before glibc 2.33, which does not tell: then all that is
    free is too much.
    """
    if not hasattr(libc, "mallinfo2"):
        return 0, 0
    facts = libc.mallinfo2()
    return facts.uordblks, facts.hblkhd


def _resident_bytes() -> int:
    """Anonymous memory of this process."""
    resident, shared = map(int, Path("/proc/self/statm").read_bytes().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
