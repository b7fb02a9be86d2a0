"""What the program asks of a task, and what most tasks answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A kind of work: which rows it reads, what is learnt from them, and how well that is done.

    Args:
        name: of the objective, a key of `settings.tasks.TASKS`.
    """

    name: str

    # From a file to a batch: what `data` asks.

    # From a batch to a score: what training, evaluation and answers ask.
