"""The cores that this process may use, and its number of threads; needs no torch."""

from __future__ import annotations

import os

from settings.fields import AUTO


def usable_cores() -> int:
    """Cores that the system lets this process run on: less than the machine's where `taskset` or a container says so."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def computing_threads(asked: int | str = AUTO) -> int:
    """Threads that products use: as asked for, else as the environment says, else a thread for each real core.

    Args:
        asked: `num_threads`.
    """
    if asked != AUTO:
        return int(asked)
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if said.isdigit() and int(said):
        return int(said)
    import psutil  # a run has it anyway; other readers of this file need not

    return max(1, min(usable_cores(), psutil.cpu_count(logical=False) or usable_cores()))


def use_threads(asked: int | str) -> None:
    """Let torch compute with as many threads as the user has named (`num_threads`)."""
    if asked != AUTO:
        import torch  # for those who compute

        torch.set_num_threads(int(asked))
