"""How are requests written together as they come? One thread has the model: between two steps answers join and leave.

Answers wait in their order. Before each step the first one joins if a row and the tokens it may need are free: its prompt is
read alone, one prompt a step, so that those being written never wait for more than one. An answer that ends, or that
nobody waits for any more, leaves at the next step. Nothing of an answer depends on the rows beside it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from devices.base import Device
from memory.cleanup import Cleaner
from memory.estimate.generation import Capacity
from memory.observe.monitor import Monitor
from memory.recovery import free_failed
from model.decoding.choosing import Choice
from model.decoding.running import RunningBatch
from serving.answers import Answer, Refused, Told
from serving.meters import Meters
from settings.errors import UserError

QUIET_SECONDS = 2.0  # without work, after which memory is given back
PRESSURE = 0.97  # share of the budget from which memory is cleaned
REST_SECONDS = 10.0  # least time between two cleanings
LOOK_STEPS = 16  # between two looks at the memory


class Engine:
    """The running batch and its queue.

    Args:
        batch: of the model. eos: the end token; start: the token that answers start with.
        capacity: what may be written at once. max_queue: answers that may wait.
        device: that the model is on.
        hand_over: called behind each step in the engine's thread, so that what answers were told travels together.
    """

    def __init__(
        self,
        batch: RunningBatch,
        eos: int,
        start: int,
        capacity: Capacity,
        max_queue: int,
        monitor: Monitor,
        device: Device,
        hand_over: Callable[[], None] = lambda: None,
    ) -> None:
        self.capacity, self.max_queue, self.monitor = capacity, max_queue, monitor
        self.meters = Meters()
        self._batch, self._eos, self._start, self._hand_over = batch, eos, start, hand_over
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._device, self._cleaner, self._rest_until = device, Cleaner(device), 0.0
        self._quiet_at = 0  # steps
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

    @property
    def tokens(self) -> int:
        """Tokens that those being written may need."""
        return sum(answer.needed_tokens for answer in list(self._running))

    def submit(self, answers: Sequence[Answer]) -> None:
        """Take the answers of one request, all or none.

        Raises:
            Refused: too many wait, or the engine has ended.
        """
        with self._changed:
            if self._is_closed:
                raise Refused(503, "the server is being ended")
            free, waiting = max(0, self.capacity.rows - len(self._running)), len(self._waiting)
            if waiting + len(answers) > self.max_queue + free:
                raise Refused(429, f"{waiting} answers wait already; come again", code="rate_limit_exceeded")
            self._waiting.extend(answers)
            self._changed.notify()

    def _work(self) -> None:
        try:
            while self._wait():
                self._drop_left()
                self._join_next()
                if self._running:
                    self._step()
                self._hand_over()
        finally:
            self._is_closed = True
            for answer in [*self._running, *self._waiting]:
                answer.finish(Told(problem="the server is being ended"))
            self._running.clear()
            self._waiting.clear()
            self._hand_over()

    def _wait(self) -> bool:
        """Sleep until there is work, with a look at the memory now and then; whether there is, and not the end."""
        while True:
            with self._changed:
                is_there = self._changed.wait_for(
                    lambda: self._is_closed or self._waiting or self._running, QUIET_SECONDS
                )
            if is_there:
                return not self._is_closed
            if self.meters.steps != self._quiet_at:  # the first time since then that nothing is to be done
                self._quiet_at = self.meters.steps
                self._cleaner.before("quiet")
            else:  # what was read and refused may have filled the memory without a step
                self._is_pressed()

    def _drop_left(self) -> None:
        for answer in [*self._running, *self._waiting]:
            if answer.is_left:
                answer.finish(Told(problem="left"))
                self.meters.left += 1
        self._keep_open()

    def _keep_open(self) -> None:
        self._running = [answer for answer in self._running if not answer.is_done]
        with self._changed:
            self._waiting = deque(answer for answer in self._waiting if not answer.is_done)

    def _join_next(self) -> None:
        if not self._waiting or len(self._running) >= self.capacity.rows:
            return
        answer = self._waiting[0]
        if self.tokens + answer.needed_tokens > self.capacity.tokens:
            return
        if self._running and self._is_pressed():
            return
        with self._changed:
            self._waiting.popleft()
        try:
            prompt = answer.prompt
            if prompt.source is None:
                prompt.source = self._safely(lambda: self._batch.read(prompt.ids))
                self.meters.prompt_tokens += len(prompt.ids)
            answer.row = self._batch.begin(prompt.source, answer.limit)
        except Exception as error:  # of this answer alone: the others go on
            self._fail([answer], error)
            return
        self._running.append(answer)

    def _step(self) -> None:
        began, answers = time.perf_counter(), self._running
        rows = [answer.row for answer in answers if answer.row is not None]
        newest = [answer.tokens[-1] if answer.tokens else self._start for answer in answers]
        try:
            tokens = self._chosen(answers, self._safely(lambda: self._batch.step(rows, newest)))
            for answer, token in zip(answers, tokens, strict=True):
                answer.take(token, self._eos)
        except Exception as error:  # the API goes on without these
            self._fail(answers, error)
        self.meters.step(len(answers), time.perf_counter() - began)
        if self.meters.steps % LOOK_STEPS == 0:
            self._is_pressed()
        self._keep_open()

    def _chosen(self, answers: Sequence[Answer], logits: Tensor) -> list[int]:
        """The next token of each row, as it would be chosen were it alone."""
        alike: dict[Choice, list[int]] = {}
        for place, answer in enumerate(answers):
            if answer.penalties.need_history or len(answer.tokens) < answer.penalties.min_new_tokens:
                written = torch.tensor([[self._start, *answer.tokens]], device=logits.device)
                answer.penalties(logits[place : place + 1], written, len(answer.tokens))
            alike.setdefault(replace(answer.choice, seed=0), []).append(place)
        chosen = [0] * len(answers)
        for choice, places in alike.items():
            tokens = choice(logits[places], [answers[place].generator for place in places]).tolist()
            for place, token in zip(places, tokens, strict=True):
                chosen[place] = token
        return chosen

    def _safely(self, compute: Callable[[], Tensor]) -> Tensor:
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
        told = "; ".join(error.problems) if isinstance(error, UserError) else f"unforeseen {type(error).__name__}"
        print(f"serve: an answer failed, {type(error).__name__}: {error}", flush=True)
        for answer in answers:
            answer.finish(Told(problem=told))

    def _is_pressed(self) -> bool:
        """Whether more of the budget is used than planned; memory is cleaned then."""
        if self.monitor.pressure() <= PRESSURE:
            return False
        if time.monotonic() >= self._rest_until:
            self._cleaner.under_pressure()
            self._rest_until = time.monotonic() + REST_SECONDS
            self.monitor.sample()
        return self.monitor.pressure() > PRESSURE
