"""Continuous batching: one thread has the model, and between two steps answers join and leave.

Answers wait in their order. Before each step the first one joins if a row and the tokens it may need are free: its
prompt is read alone, one prompt a step, so that those being written never wait for more than one. An answer that ends,
or that nobody waits for any more, leaves at the next step. Nothing of an answer depends on the rows beside it. Between
steps the same thread computes the vectors of texts, one request at a time; of an encoder it does nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from devices.base import Device
from memory.cleanup import Cleaner, free_failed
from memory.monitor import Monitor
from model.decoding.answer_tree import AnswerTree
from model.decoding.decoder import Decoder
from model.decoding.sampling import next_tokens
from serving.answers import Answer, Refused
from serving.meters import Meters
from settings.errors import UserError, reason_of
from support.language import english, say

Result = TypeVar("Result")
MOST_WAITING = 64  # answers, or computations, in the queue; further requests are turned away
QUIET_SECONDS = 2.0  # without work, after which memory is given back
PRESSURE = 0.97  # share of the budget from which memory is cleaned
REST_SECONDS = 10.0  # least time between two cleanings
LOOK_STEPS = 16  # between two looks at the memory


@dataclass(frozen=True)
class Capacity:
    """What may be written at once by rows that come and go.

    Args:
        rows: most answers. tokens: of their prompts and answers together, each padded to the longest. parts: component
            -> bytes, at the highest.
    """

    rows: int
    tokens: int
    parts: dict[str, int]


class AnswerEngine:
    """The running batch and its queue.

    Args:
        decoder: None: the model writes nothing.
        capacity: what may be written at once.
        device: that the model is on. tree: the answers that there are; None: any.
    """

    def __init__(
        self,
        decoder: Decoder | None,
        capacity: Capacity,
        monitor: Monitor,
        device: Device,
        tree: AnswerTree | None = None,
    ) -> None:
        self.decoder = decoder
        self.capacity = capacity
        self.queue_limit = MOST_WAITING
        self.monitor = monitor
        self.tree = tree
        self.meters = Meters()
        self.hand_over: Callable[[], object] = lambda: None  # called behind each step in the engine's thread
        self.tokens = 0  # that there is room for, of those being written
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []  # in the order of the decoder's rows
        self._computations: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._device = device
        self._cleaner = Cleaner(device)
        self._next_cleaning = 0.0  # on the clock of `time.monotonic`
        self._steps_when_quiet = 0
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """End at once: what is being written or waits ends with a problem, and the thread is gone."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether answers are written."""
        return self._thread.is_alive() and not self._is_closed

    @property
    def waiting(self) -> int:
        """Answers in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Answers being written."""
        return len(self._running)

    def submit(self, answers: Sequence[Answer]) -> None:
        """Take the answers of one request, all or none.

        Raises:
            Refused: too many wait, or the engine has ended.
        """
        with self._changed:
            free = max(0, self.capacity.rows - len(self._running))
            self._refuse_if_full(len(self._waiting), len(answers), self.queue_limit + free)
            self._waiting.extend(answers)
            self._changed.notify()

    def compute(self, work: Callable[[], Result]) -> Future[Result]:
        """What the engine's thread computes between two steps.

        Raises:
            Refused: too many wait, or the engine has ended.
        """
        future = Future[Result]()
        with self._changed:
            self._refuse_if_full(len(self._computations), 1, self.queue_limit + 1)
            self._computations.append((future, work))
            self._changed.notify()
        return future

    def _refuse_if_full(self, waiting: int, more: int, most: int) -> None:
        if self._is_closed:
            raise Refused(503, "the server is being ended")
        if waiting + more > most:
            raise Refused(429, f"{waiting} wait already; come again", code="rate_limit_exceeded")

    def _compute_next(self) -> None:
        with self._changed:
            future, work = self._computations.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._safely(work))
        except Exception as error:
            self.meters.failed += not isinstance(error, UserError)
            future.set_exception(error)
        self._is_pressed()

    def _work(self) -> None:
        try:
            while self._wait():
                if self.decoder is not None:
                    self._write(self.decoder)
                if self._computations:
                    self._compute_next()
                self.hand_over()
        finally:
            with self._changed:
                self._is_closed = True
            for future, _ in self._computations:
                future.cancel()
            for answer in [*self._running, *self._waiting]:
                answer.finish(problem="the server is being ended")
            self._running.clear()
            self._waiting.clear()
            self.hand_over()

    def _wait(self) -> bool:
        """Sleep until there is work, with a look at the memory now and then; whether there is, and not the end."""
        while True:
            with self._changed:
                is_there = self._changed.wait_for(
                    lambda: self._is_closed or self._waiting or self._running or self._computations, QUIET_SECONDS
                )
            if is_there:
                return not self._is_closed
            if self.meters.steps != self._steps_when_quiet:  # Nothing is to be done, for the first time since then.
                self._steps_when_quiet = self.meters.steps
                self._cleaner.before("quiet")
            else:  # Requests that were read and refused may have filled the memory without a step.
                self._is_pressed()

    def _write(self, decoder: Decoder) -> None:
        """Let answers leave and join, then take a step with all."""
        for answer in [*self._running, *self._waiting]:
            if answer.is_abandoned:
                answer.finish(problem="left")
                self.meters.abandoned += 1
        self._drop_done(decoder)
        if self._waiting and self._has_room(decoder, self._waiting[0]):
            self._join_next(decoder)
        if self._running:
            self._step(decoder)

    def _drop_done(self, decoder: Decoder) -> None:
        done = {row for row, answer in enumerate(self._running) if answer.is_done}
        if done:
            self._running = [self._running[row] for row in decoder.drop(done)]
        with self._changed:
            self._waiting = deque(answer for answer in self._waiting if not answer.is_done)
        self.tokens = decoder.cache.tokens_with()

    def _has_room(self, decoder: Decoder, answer: Answer) -> bool:
        if not self._running:
            return True
        tokens = decoder.cache.tokens_with([len(answer.ids)], [answer.settings.max_new_tokens])
        fits = len(self._running) < self.capacity.rows and tokens <= self.capacity.tokens
        return fits and not self._is_pressed()

    def _join_next(self, decoder: Decoder) -> None:
        with self._changed:
            answer = self._waiting.popleft()
        try:
            self._safely(lambda: decoder.join([answer.ids], answer.settings.max_new_tokens))
        except Exception as error:  # Of this answer alone: the others go on.
            self._fail([answer], error)
            return
        self.meters.prompt_tokens += len(answer.ids)
        self._running.append(answer)

    def _step(self, decoder: Decoder) -> None:
        began = time.perf_counter()
        answers = self._running
        shape = decoder.model.config
        newest = [answer.tokens[-1] if answer.tokens else shape.start_token_id for answer in answers]
        try:
            choices = None
            if self.tree is not None:
                choices = self.tree.choices(np.array([answer.node for answer in answers]), shape.vocab_size)
            logits = self._safely(lambda: decoder.step(newest, choices))
            for answer, token in zip(answers, next_tokens(answers, logits, shape, choices), strict=True):
                answer.take(token, shape.eos_token_id)
                if self.tree is not None:
                    for certain in self.tree.tail(answer.node):
                        answer.take(certain, shape.eos_token_id)
        except Exception as error:  # The API goes on without these.
            self._fail(answers, error)
        self.meters.step(len(answers), time.perf_counter() - began)
        if self.meters.steps % LOOK_STEPS == 0:
            self._is_pressed()
        self._drop_done(decoder)

    def _safely(self, compute: Callable[[], Result]) -> Result:
        """Compute; where memory does not suffice, once more with everything freed that nobody uses."""
        try:
            return compute()
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                raise
            free_failed(error, self._device)
        return compute()

    def _fail(self, answers: Sequence[Answer], error: Exception) -> None:
        self.meters.failed += len(answers)
        problem = english(reason_of(error)) if isinstance(error, UserError) else f"unforeseen {type(error).__name__}"
        text = "serve: an answer failed, {kind} ({reason})"
        print(say(text, kind=type(error).__name__, reason=reason_of(error)), flush=True)
        for answer in answers:
            answer.finish(problem=problem)

    def _is_pressed(self) -> bool:
        """Whether more of the budget is used than planned; memory is cleaned then."""
        if self.monitor.pressure() <= PRESSURE:
            return False
        if time.monotonic() >= self._next_cleaning:
            self._cleaner.under_pressure()
            self._next_cleaning = time.monotonic() + REST_SECONDS
            self.monitor.sample()
        return self.monitor.pressure() > PRESSURE
