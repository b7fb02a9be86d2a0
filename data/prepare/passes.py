"""A pass over all rows: read in batches from a position on, worked on by several processes, results in the order of the rows.

What a pass gives does not depend on the number of processes. The same files give the same batches, so that a position is
enough to continue from; what was read of a file before is read again and passed over.
"""

from __future__ import annotations

import json
import os
import queue
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from childproc import MEMORY, ChildDied, Worker
from data.sources.columns import Columns
from data.sources.lines import BadRows
from data.sources.reading import read_source
from data.sources.source import Source
from data.text.conversations import TextRow
from language import say
from settings.errors import DoesNotFit
from storage import write_text

Result = TypeVar("Result")
AHEAD = 2  # batches under way for each worker, so that it need not wait


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
class Batch:
    """Some rows as they were read, and the position after them."""

    rows: list[TextRow]
    end: Position


def read_batches(
    sources: Sequence[Source],
    columns: Columns | Sequence[str],
    bad_rows: BadRows,
    max_rows: int | None,
    start: Position,
) -> Iterator[Batch]:
    """Read sources from a position on.

    Args:
        bad_rows: at the end it has counted all broken rows, those before the position included.
        max_rows: rows to read at most, over all files and attempts; None: all.
    """
    bad_rows.count, bad_rows.examples = start.bad_rows, list(start.examples)
    count, done = start.rows, start.batch
    for number in range(start.source, len(sources)):
        before = bad_rows.count, tuple(bad_rows.examples)
        for batch, rows in enumerate(read_source(sources[number], columns, bad_rows)):
            if batch < done:
                continue
            rows = rows if max_rows is None else rows[: max_rows - count]
            count += len(rows)
            if rows:
                yield Batch(rows, Position(number, batch + 1, count, *before))
            if count == max_rows:
                return
        done = 0


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write how far a pass has come, behind its checksum."""
    text = json.dumps(state)
    write_text(path, f"{zlib.crc32(text.encode()):08x}{text}")


def saved_state(path: Path) -> dict[str, Any] | None:
    """How far an earlier pass came; None: there was none. Raises ValueError where it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if f"{zlib.crc32(content[8:]):08x}".encode() != content[:8]:
        raise ValueError(say("its checksum is another"))
    return dict(json.loads(content[8:]))


Run = Callable[[Iterable[Batch]], Iterator[tuple[Batch, Result]]]


@contextmanager
def workers_in_order(
    make: Callable[..., Callable[[Sequence[TextRow]], Result]], arguments: tuple[Any, ...], workers: int
) -> Iterator[Run[Result]]:
    """Give a function that maps batches to the results of their rows, in the same order.

    Args:
        make: a function of a module; `make(*arguments)` is the work.
        workers: processes; 0: the work is done here.
    Raises:
        UserError: raised by the work. DoesNotFit: a process was killed. ChildDied: one failed.
    Memory: 2 batches and results a worker, and the processes.
    """
    if workers == 0:
        work = make(*arguments)
        yield lambda batches: ((batch, work(batch.rows)) for batch in batches)
        return
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def ask(rows: Sequence[TextRow]) -> Result:
        worker = idle.get()
        try:
            answer: Result = worker.ask(rows)
        finally:
            idle.put(worker)
        return answer

    def run(batches: Iterable[Batch]) -> Iterator[tuple[Batch, Result]]:
        under_way: deque[tuple[Batch, Future[Result]]] = deque()
        for batch in batches:
            under_way.append((batch, pool.submit(ask, batch.rows)))
            if len(under_way) == AHEAD * workers:
                first, future = under_way.popleft()
                yield first, future.result()
        for first, future in under_way:
            yield first, future.result()

    with ExitStack() as stack:
        for _ in range(workers):
            idle.put(stack.enter_context(Worker(make, *arguments, environment=environment, is_interruptible=False)))
        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        try:
            yield run
        except ChildDied as died:
            if died.reason != MEMORY:
                raise
            raise DoesNotFit(
                "a preparing process was killed by the system, most likely for lack of memory; "
                "lower --prepare_workers, what is done is kept"
            ) from None
