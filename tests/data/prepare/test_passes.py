"""Batches are worked on by several processes, and their results come in the order of the rows."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest

from common.child_process import ChildDied
from data.prepare.passes import Batch, Position, workers_in_order
from settings.errors import DoesNotFit, UserError


def batches(taken: list[int] | None = None) -> Iterator[Batch]:
    for number in range(40):
        if taken is not None:
            taken.append(number)
        yield Batch([(str(number),)], Position())


def squares(offset: int) -> Callable[[Sequence[Sequence[str]]], int]:
    return lambda rows: int(rows[0][0]) ** 2 + offset


def trouble(how: str) -> Callable[[Sequence[Sequence[str]]], None]:
    def work(rows: Sequence[Sequence[str]]) -> None:
        if rows[0][0] == "3":
            if how == "user":
                raise UserError("--x = 3, is wrong; use 4")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(7)

    return work


@pytest.mark.parametrize("workers", [0, 2])
def test_results_come_in_the_order_of_the_rows(workers: int) -> None:
    with workers_in_order(squares, (5,), workers) as run:
        assert [result for _, result in run(batches())] == [number**2 + 5 for number in range(40)]
        assert list(run([])) == []
        taken: list[int] = []
        results = run(batches(taken))
        next(results)
        assert len(taken) <= 2 * max(workers, 1), "no more is read ahead than is under way"


@pytest.mark.parametrize("how, error", [("user", UserError), ("kill", DoesNotFit), ("exit", ChildDied)])
def test_trouble_of_a_worker_reaches_the_user(how: str, error: type[Exception]) -> None:
    with pytest.raises(error), workers_in_order(trouble, (how,), 2) as run:
        list(run(batches()))
