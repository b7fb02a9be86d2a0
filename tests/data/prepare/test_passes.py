"""What goes wrong in a process that works on batches reaches the user."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest

from data.prepare.passes import Position, TextBatch, workers_in_order
from settings.errors import DoesNotFit, UserError


def batches(*texts: str) -> Iterator[TextBatch]:
    for text in texts:
        yield TextBatch([(text,)], Position())


def working() -> Callable[[Sequence[Sequence[str]]], int]:
    def work(rows: Sequence[Sequence[str]]) -> int:
        if rows[0][0] == "user":
            raise UserError("--x = 3, is wrong; use 4")
        if rows[0][0] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    return work


def test_trouble_of_a_worker_reaches_the_user() -> None:
    with pytest.raises(DoesNotFit), workers_in_order(working, (), 2) as run:
        with pytest.raises(UserError):
            list(run(batches("good", "user")))
        list(run(batches("good", "kill")))
