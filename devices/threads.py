"""How many threads compute: as many as other programs leave, looked at before the first step and now and then.

The threads of a product spin while they wait for each other. Where another program takes the core of one of them, all
wait: beside two busy programs two threads on two cores take several times as long as one. Numbers do not depend on the
number of threads (tests/engine/test_threads.py), so it may follow from what is measured; a number that the user names
is kept. Source: proc_stat(5).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from devices.cores import core_numbers, core_quota, threads_of_environment, usable_cores
from settings.fields import AUTO

LOOK_SECONDS = 2.0
LEAST_SECONDS = 0.25  # A look takes at least so long, because the system counts in hundredths of a second.
ENOUGH = 0.5  # One more thread is worth it from this share of a core on.
ENOUGH_FOR_MORE = 0.75  # A thread that does not run yet needs more, so that the number does not swing.


@dataclass(frozen=True)
class CoreUsage:
    """Seconds since some moment, and core seconds worked in them: by all on the cores that this process may use, and by
    itself.
    """

    seconds: float
    busy: float
    own: float


def free_cores(before: CoreUsage, now: CoreUsage, cores: float, processes: int = 1) -> float:
    """Cores that other programs have left to this process, one of several like it in the same run."""
    seconds = now.seconds - before.seconds
    foreign = (now.busy - before.busy - processes * (now.own - before.own)) / seconds
    return (cores - max(0.0, foreign)) / processes


def fitting_threads(cores: float, cores_before: float, now: int, most: int) -> int:
    """Threads that each have a core.

    Args:
        cores: that other programs leave. cores_before: at the look before; more threads need two looks.
        now: threads so far. most: threads on a machine without other programs.
    """
    fewer = math.floor(cores + 1 - ENOUGH)
    more = math.floor(min(cores, cores_before) + 1 - ENOUGH_FOR_MORE)
    return max(1, min(most, fewer if fewer < now else max(now, more)))


def usage() -> CoreUsage | None:
    """What has been worked so far; None where the system does not say."""
    import psutil

    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, RuntimeError, NotImplementedError, psutil.Error):
        return None
    own = core_numbers()
    resting = ("idle", "iowait", "guest", "guest_nice")  # The times of guests are also counted as user and nice.
    busy = 0.0
    for core, kinds in enumerate(times):
        if core in own:
            busy += sum(max(0.0, seconds) for kind, seconds in kinds._asdict().items() if kind not in resting)
    return CoreUsage(time.monotonic(), busy, time.process_time())


class Threads:
    """The threads that torch and the compiled kernels use in this process."""

    _free_cores: float  # Cores that others left at the last look; infinite before the first.
    _usage: CoreUsage | None  # At the last look; None where the number of threads is fixed or the system tells nothing.

    def __init__(self, requested: int | str = AUTO, processes: int = 1, default: int | None = None) -> None:
        """
        Args:
            requested: `num_threads`. processes: of this run on this machine. default: threads on a machine without
                other programs where nobody names a number; None: those of torch.
        """
        import torch

        self.default = default or torch.get_num_threads()
        self.most = self.default if requested == AUTO else int(requested)
        torch.set_num_threads(self.most)
        self.is_fixed = requested != AUTO or threads_of_environment() is not None
        self._processes = processes
        self._quota = (core_quota() or math.inf) / processes
        if not self.is_fixed and self.most > max(1.0, self._quota):
            self.most = max(1, int(self._quota))
            torch.set_num_threads(self.most)
        self.now = self.most
        self.restart_measurement()

    def follow(self) -> None:
        """Look, where it is time, and use as many threads as there are cores left. Called by the thread that
        computes.
        """
        if self.is_fixed or self._usage is None or self.most == 1:
            return
        seconds = time.monotonic() - self._usage.seconds
        if math.isinf(self._free_cores):
            time.sleep(max(0.0, LEAST_SECONDS - seconds))
        elif seconds < LOOK_SECONDS:
            return
        before = self._usage
        self._usage = usage()
        if self._usage is None:
            return
        cores = min(self._quota, free_cores(before, self._usage, usable_cores(), self._processes))
        self.now = fitting_threads(cores, self._free_cores, self.now, self.most)
        self._free_cores = cores
        import torch

        torch.set_num_threads(self.now)

    def restart_measurement(self) -> None:
        """Measure the load of other processes from now on.

        The load until now may have been that of this process's own children.
        """
        self._free_cores = math.inf
        self._usage = None if self.is_fixed else usage()


_threads: Threads | None = None


def use_threads(requested: int | str, processes: int = 1) -> Threads:
    """Let torch compute with as many threads as the user has named (`num_threads`), or as other programs leave."""
    global _threads
    import torch

    default = torch.get_num_threads()
    if _threads is not None and default == _threads.now:
        default = _threads.default  # A run before this one, in the same process, has changed what torch says.
    _threads = Threads(requested, processes, default)
    return _threads


def keep_threads() -> None:
    """Use as many threads as now from here on: what torch has compiled holds for one number of them."""
    if _threads is not None:
        _threads.is_fixed = True


def follow_machine() -> None:
    """Use as many threads as other programs leave now; between two pieces of work, in the thread that computes."""
    if _threads is not None:
        _threads.follow()


@contextmanager
def one_thread() -> Iterator[None]:
    """Until the context ends, products of this thread use one thread: of 5 to 11 rows, as those of a head over labels,
    MKL gives other last bits with two.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def most_threads() -> int:
    """Threads on a machine without other programs: what plans count on, which do not change as others work."""
    import torch

    return torch.get_num_threads() if _threads is None else _threads.most
