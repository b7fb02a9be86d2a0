"""A pass over all rows: read in batches from a position on, worked on by several processes, results in the order of the
rows.

What a pass gives does not depend on the number of processes. The same files give the same batches, so that a position
is enough to continue from; what was read of a file before is read again and passed over.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from data.sources.columns import Columns
from data.sources.lines import BadRows
from data.sources.reading import read_source
from data.sources.source import Source
from data.text.conversations import TextRow
from settings.errors import DoesNotFit
from support.child_process import MEMORY, ChildDied, Worker

Result = TypeVar("Result")
AHEAD = 2  # Batches under way for each worker, so that it need not wait.


@dataclass(frozen=True)
class Position:
    """How far a pass has come.

    Args:
        source: number of the file; batch: batches of it that are done; rows: read over all files.
        bad_rows, examples: broken rows before this file, and the first of them.
    """

    source: int = 0
    batch: int = 0
    rows: int = 0
    bad_rows: int = 0
    examples: Sequence[str] = ()


@dataclass(frozen=True)
class TextBatch:
    """Some rows as they were read, and the position after them."""

    rows: list[TextRow]
    end: Position


def read_batches(
    sources: Sequence[Source],
    columns: Columns | Sequence[str],
    bad_rows: BadRows,
    max_rows: int | None,
    start: Position,
) -> Iterator[TextBatch]:
    """Read sources from a position on.

    Args:
        bad_rows: at the end it has counted all broken rows, those before the position included.
        max_rows: rows to read at most, over all files and attempts; None: all.
    """
    most = sys.maxsize if max_rows is None else max_rows
    bad_rows.count = start.bad_rows
    bad_rows.examples = list(start.examples)
    count = start.rows
    done = start.batch
    for number in range(start.source, len(sources)):
        before = bad_rows.count, tuple(bad_rows.examples)
        for batch, rows in enumerate(read_source(sources[number], columns, bad_rows), 1):
            if batch > done:
                rows = rows[: most - count]
                count += len(rows)
                yield TextBatch(rows, Position(number, batch, count, *before))
            if batch >= done and count == most:
                return
        done = 0


Run = Callable[[Iterable[TextBatch]], Iterator[tuple[TextBatch, Result]]]


@contextmanager
def workers_in_order(
    make: Callable[..., Callable[[Sequence[TextRow]], Result]], arguments: tuple[Any, ...], workers: int
) -> Iterator[Run[Result]]:
    """Give a function that maps batches to the results of their rows, in the same order.

    Args:
        make: a function of a module; `make(*arguments)` is the work.
        workers: processes, which take turns; 0: the work is done here.
    Raises:
        UserError: raised by the work. DoesNotFit: a process was killed. ChildDied: one failed.
    Memory: 2 batches and results a worker, and the processes.
    """
    if workers == 0:
        work = make(*arguments)
        yield lambda batches: ((batch, work(batch.rows)) for batch in batches)
        return
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        # Each process has a thread that waits for its answers.
        lines = [
            (
                stack.enter_context(Worker(make, *arguments, environment=environment, is_interruptible=False)),
                stack.enter_context(ThreadPoolExecutor(1)),
            )
            for _ in range(workers)
        ]

        def run(batches: Iterable[TextBatch]) -> Iterator[tuple[TextBatch, Result]]:
            under_way: deque[tuple[TextBatch, Future[Result]]] = deque()
            for number, batch in enumerate(batches):
                worker, thread = lines[number % workers]
                under_way.append((batch, thread.submit(worker.ask, batch.rows)))
                if len(under_way) == AHEAD * workers:
                    first, future = under_way.popleft()
                    yield first, future.result()
            for first, future in under_way:
                yield first, future.result()

        try:
            yield run
        except ChildDied as died:
            if died.reason != MEMORY:
                raise
            raise DoesNotFit(
                "a preparing process was killed by the system, most likely for lack of memory; "
                "lower --prepare_workers, what is done is kept"
            ) from None
