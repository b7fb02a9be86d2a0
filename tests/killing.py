"""Child processes that die before, or after, one of their changes of the disk."""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks.faults.disk_faults import watch_changes

DIED = 77


def run_child(work: Callable[[], None]) -> int:
    """The exit code of a child that does the work; 1 where it fails."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(number: int, is_after: bool) -> None:
    """Let this process die before, or after, the call of this number that changes the disk."""
    calls = iter(range(1_000_000))

    def around(name: str, plain: Callable[..., object], *arguments: object, **named: object) -> object:
        is_last = next(calls) == number
        if is_last and not is_after:
            os._exit(DIED)
        try:
            return plain(*arguments, **named)
        finally:
            if is_last:
                os._exit(DIED)

    watch_changes(around)
