"""Batches are worked on by several processes, and their results come in the order of the rows."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence

import pytest

from common.child_process import ChildDied
from data.prepare.passes import Position, Run, TextBatch, workers_in_order
from settings.errors import DoesNotFit, UserError


def batches(texts: Sequence[str], read: list[str]) -> Iterator[TextBatch]:
    for text in texts:
        read.append(text)
        yield TextBatch([(text,)], Position())


def working(offset: int) -> Callable[[Sequence[Sequence[str]]], int]:
    def work(rows: Sequence[Sequence[str]]) -> int:
        text = rows[0][0]
        if text == "user":
            raise UserError("--x = 3, is wrong; use 4")
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "exit":
            os._exit(7)
        return int(text) ** 2 + offset

    return work


def check_order(run: Run[int], workers: int) -> None:
    numbers = list(map(str, range(40)))
    assert [result for _, result in run(batches(numbers, []))] == [number**2 + 5 for number in range(40)]
    assert list(run([])) == []
    read: list[str] = []
    next(run(batches(numbers, read)))
    assert len(read) <= 2 * max(workers, 1), "no more is read ahead than is under way"


def test_results_come_in_the_order_of_the_rows_and_trouble_reaches_the_user() -> None:
    with workers_in_order(working, (5,), 0) as here:
        check_order(here, 0)
    with pytest.raises(DoesNotFit), workers_in_order(working, (5,), 2) as run:
        check_order(run, 2)
        with pytest.raises(UserError):
            list(run(batches(["1", "user"], [])))
        list(run(batches(["1", "kill"], [])))
    with pytest.raises(ChildDied), workers_in_order(working, (5,), 1) as run:
        list(run(batches(["exit"], [])))
