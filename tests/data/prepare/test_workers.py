from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.batches.lengths import BOUNDS, LengthCounts
from data.prepare.pace import Pace, noted_in
from data.prepare.workers import in_order
from settings.errors import DoesNotFit, UserError
from terminal import fitted


def squares(offset: int) -> Callable[[int], int]:
    return lambda number: number**2 + offset


def trouble(how: str) -> Callable[[int], int]:
    def work(number: int) -> int:
        if number == 3:
            if how == "user":
                raise UserError("--x = 3, is wrong; use 4")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(7)
        return number

    return work


def same(number: int) -> int:
    return number


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_the_order_of_the_work(workers: int) -> None:
    with in_order(squares, (5,), workers) as run:
        assert list(run(range(40), same)) == [(number, number**2 + 5) for number in range(40)]
        assert list(run([], same)) == []


@pytest.mark.parametrize(
    "how, error, words",
    [
        ("user", UserError, "is wrong"),
        ("kill", DoesNotFit, "killed by the system"),
        ("exit", RuntimeError, "exit code 7"),
    ],
)
def test_trouble_of_a_worker_reaches_the_user(how: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words), in_order(trouble, (how,), 2) as run:
        list(run(range(10), same))


def test_items_are_not_read_far_ahead() -> None:
    taken = []

    def items() -> object:
        for number in range(100):
            taken.append(number)
            yield number

    with in_order(squares, (0,), 2) as run:
        results = run(items(), same)  # type: ignore[arg-type]
        next(results)
        assert len(taken) <= 4


def test_lengths_are_counted_in_buckets_with_exact_extremes() -> None:
    counts = LengthCounts()
    counts.add(np.array([1, 5, 6, 7, 100]), np.array([1, 5, 6, 7, 900]))
    counts.add(np.array([], np.int64), np.array([], np.int64))
    facts = counts.facts()
    assert (facts["longest"], facts["longest_uncut"], facts["mean"]) == (100, 900, 23.8)
    assert facts["histogram"] == [[1, 1], [6, 2], [8, 1], [128, 1]]
    assert (np.diff(BOUNDS) > 0).all()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_the_pace_is_shown_now_and_then(stream: io.StringIO) -> None:
    now = [0.0]
    pace = Pace("preparing train", 1000, stream, lambda: now[0])
    for _ in range(40):
        now[0] += 1.0
        pace.add(100, 2 * 10**6, "file 2 of 3")
    pace.close()
    shown = stream.getvalue()
    assert "preparing train: 1,200 rows, 100 rows/s, 2.0 MB/s, file 2 of 3" in shown
    assert (shown.count("\r") > 20) == stream.isatty() and shown.count("\n") == (0 if stream.isatty() else 4)


def test_the_first_row_is_one_row() -> None:
    now, stream = [0.0], io.StringIO()
    pace = Pace("preparing train", 0, stream, lambda: now[0])
    now[0] = 10.0
    pace.add(1, 10)
    assert stream.getvalue().startswith("preparing train: 1 row, ")


def test_the_work_goes_on_where_nobody_looks_any_more() -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    pace = Pace("preparing train", 0, Gone(), iter([0.0, 10.0]).__next__)
    pace.add(1, 10)
    pace.close()


def test_what_is_shown_stands_in_a_file_too(tmp_path: Path) -> None:
    with noted_in(tmp_path / "note"):
        Pace("preparing train", 1000, io.StringIO(), iter([0.0, 10.0]).__next__).add(500, 10**6)
    note = json.loads((tmp_path / "note").read_text())
    assert note == {"what": "preparing train", "rows": 1500, "rows_per_second": 50.0}
    with noted_in(tmp_path / "missing" / "note"):
        Pace("preparing train", 0, io.StringIO(), iter([0.0, 10.0]).__next__).add(1, 1)


def test_quick_work_shows_nothing() -> None:
    stream = Terminal()
    pace = Pace("preparing", 0, stream, lambda: 1.0)
    pace.add(10, 10)
    pace.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_line_fits_its_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider one would leave its first part behind at each renewal."""
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    stream = Terminal()
    stream.fileno = lambda: 1  # type: ignore[method-assign]
    pace = Pace("为分词器读取数据" * 4, 0, stream, iter([0.0, 9.0]).__next__)
    pace.add(9_000, 4_000_000, "file 1 of 2")
    line = stream.getvalue().removeprefix("\r")
    assert sum(2 if letter > "\u2e80" else 1 for letter in line) == min(118, columns - 1)


def test_a_line_is_cut_before_a_letter_that_does_not_fit() -> None:
    assert fitted("abc", 5) == "abc  " and fitted("a数据", 4) == "a数 " and fitted("abcdef", 4) == "abcd"
