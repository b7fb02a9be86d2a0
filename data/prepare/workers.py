"""How do several processes share work so that the results come in the order of the work?

Each worker is a fresh interpreter that builds one callable and then answers requests over its standard streams. A thread
of this process waits for each worker, so that neither side can block the other, and results are handed on in order: their
content does not depend on how many workers there are. A worker ends when its input ends, so none outlives this process.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from data.prepare.child import BEFORE
from screen import stand_guard
from settings.errors import DoesNotFit, UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
START = f"{BEFORE}; from data.prepare.workers import serve; serve()"
AHEAD = 2  # requests under way for each worker, so that it need not wait


class Worker:
    """One process that holds what `make(*arguments)` returns and calls it for each request."""

    def __init__(self, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._send((make, arguments))

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def ask(self, request: Any) -> Any:
        """Send one request and wait for its answer.

        Raises:
            UserError: raised by the callable. DoesNotFit: the system killed the process. RuntimeError: it failed.
        """
        assert self._process.stdout is not None
        try:
            self._send(request)
            problems, answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = self._process.wait()
            if code == -getattr(signal, "SIGKILL", 9):
                raise DoesNotFit(
                    "a preparing process was killed by the system, most likely for lack of memory; "
                    "lower --prepare_workers, what is done is kept"
                ) from None
            raise RuntimeError(f"a preparing process ended with exit code {code}; its messages stand above") from None
        if problems is not None:
            raise UserError(*problems)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve() -> None:
    """Answer requests until the input ends."""
    stand_guard()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever a library prints must not mix with the answers
        try:
            make, arguments = pickle.load(sys.stdin.buffer)
            work: Callable[[Any], Any] | None = None
            while True:
                request = pickle.load(sys.stdin.buffer)
                try:
                    work = work or make(*arguments)
                    reply: tuple[list[str] | None, Any] = (None, work(request))
                except UserError as error:
                    reply = (error.problems, None)
                pickle.dump(reply, answers, pickle.HIGHEST_PROTOCOL)
                answers.flush()
        except (EOFError, BrokenPipeError):
            os._exit(0)  # the parent is done, or gone


@contextmanager
def in_order(
    make: Callable[..., Callable[[Any], Result]], arguments: tuple[Any, ...], workers: int
) -> Iterator[Callable[[Iterable[Item], Callable[[Item], Any]], Iterator[tuple[Item, Result]]]]:
    """Give a function that maps items to results, in the order of the items.

    Args:
        make: a function of a module; `make(*arguments)` is the work, a callable of one request.
        workers: processes; 0: the work is done here.
    Yields:
        `run(items, request_of)` -> pairs of an item and the work's result for `request_of(item)`.
    Memory:
        2 requests and results a worker, and the processes.
    """
    if workers == 0:
        work = make(*arguments)
        yield lambda items, request_of: ((item, work(request_of(item))) for item in items)
        return
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    started = [Worker(make, arguments) for _ in range(workers)]
    for worker in started:
        idle.put(worker)

    def ask(request: Any) -> Any:
        worker = idle.get()
        try:
            return worker.ask(request)
        finally:
            idle.put(worker)

    def run(items: Iterable[Item], request_of: Callable[[Item], Any]) -> Iterator[tuple[Item, Result]]:
        under_way: deque[tuple[Item, Future[Any]]] = deque()
        for item in items:
            under_way.append((item, pool.submit(ask, request_of(item))))
            if len(under_way) >= AHEAD * workers:
                first, future = under_way.popleft()
                yield first, future.result()
        while under_way:
            first, future = under_way.popleft()
            yield first, future.result()

    pool = ThreadPoolExecutor(workers)
    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)
        for worker in started:
            worker.close()
