"""The cores that this process may use, and its number of threads; needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from settings.fields import AUTO


def core_numbers() -> set[int]:
    """Cores that the system lets this process run on: less than the machine's where `taskset` or a container says
    so.
    """
    if hasattr(os, "sched_getaffinity"):  # Linux alone.
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many cores the system lets this process run on."""
    return len(core_numbers())


def core_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that the own control group allows; None without a quota."""
    for line in _text_of(root / f"proc/{os.getpid()}/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        inside = path.strip("/")
        if number == "0":
            words = _text_of(root / "sys/fs/cgroup" / inside / "cpu.max").split()
        elif "cpu" in controllers.split(","):
            base = root / "sys/fs/cgroup/cpu" / inside
            words = [_text_of(base / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            continue
        quota = re.fullmatch(r"(\d+) ([1-9]\d*)", " ".join(words))
        if quota:
            return round(int(quota[1]) / int(quota[2]), 2)
    return None


def threads_of_environment() -> int | None:
    """The number of threads that OMP_NUM_THREADS or MKL_NUM_THREADS names, which torch reads; None where neither
    does.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = os.environ.get(name, "").partition(",")[0].strip()
        if value.isdigit() and int(value):
            return int(value)
    return None


def computing_threads(requested: int | str = AUTO) -> int:
    """Threads that products use: as requested, else as the environment says, else a thread for each real core.

    Args:
        requested: `num_threads`.
    """
    if requested != AUTO:
        return int(requested)
    if (threads := threads_of_environment()) is not None:
        return threads
    import psutil  # A run has it anyway; other readers of this file need not.

    cores = min(usable_cores(), psutil.cpu_count(logical=False) or usable_cores())
    return max(1, min(cores, int(core_quota() or cores)))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf8", errors="replace")
    except OSError:
        return ""
