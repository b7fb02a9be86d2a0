"""With whom does a process settle how a run begins? A single one with nobody; several: `collectives.Together`. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

Value = TypeVar("Value")


class Alone:
    """The one process of a run. `is_main`: it speaks for all; `is_first_here`: it is the first on this machine."""

    is_main = is_first_here = True

    def agree_on(self, value: Value) -> Value:
        """The main process's value, on all processes."""
        return value

    def by_main(self, work: Callable[[], Value]) -> Value:
        """What the main process alone finds out, on all processes; what it refuses, all refuse."""
        return work()

    def first_here(self) -> AbstractContextManager[object]:
        """A context that the first process of a machine leaves before the others enter it."""
        return nullcontext()
