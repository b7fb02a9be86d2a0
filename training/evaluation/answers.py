"""Answers to many prompts inside the memory budget: the one place that decides how many of them are written at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from devices.sizes import ANSWERED_TOGETHER
from engine.blockwise import Blockwise
from memory.answers import AnswerBatch, largest
from memory.monitor import Monitor
from model.decoding.answer_tree import AnswerTree
from model.decoding.beam_search import ScoredAnswer
from model.decoding.decoder import Decoder
from model.decoding.generation import generate_best, write
from model.decoding.sampling import AnswerRow
from settings.declared import GenerateConfig
from training.evaluation.prompt_parts import PromptParts

Written = TypeVar("Written")
ANSWERS = "answers"  # The phase of the monitor.


def decoder_of(model: Blockwise, num_beams: int = 1) -> Decoder:
    """A fresh decoder of a model."""
    store = model.weight_store
    return Decoder(model.model, store.for_products, store.compute_dtype, num_beams)


class AnswerBudget:
    """Keeps writing inside a budget: what a batch took beyond its prediction is added to those of the next ones.

    Args:
        predict: component -> bytes of everything that is held at the highest. budget_bytes: that may be.
        monitor: measures what is.
    """

    def __init__(self, predict: Callable[[AnswerBatch], dict[str, int]], budget_bytes: int, monitor: Monitor) -> None:
        self.predict = predict
        self.budget_bytes = budget_bytes
        self.monitor = monitor
        self.excess_bytes = 0
        self._highest_bytes = 0

    def fits(self, batch: AnswerBatch) -> bool:
        """Whether the budget holds a batch, as predicted."""
        return sum(self.predict(batch).values()) <= self.budget_bytes

    def rows(self, batch: AnswerBatch) -> int:
        """The most rows that fit, by what has been measured too: at least one where the prediction says so; else 0."""

        def fits(rows: int) -> bool:
            return sum(self.predict(replace(batch, rows=rows)).values()) + self.excess_bytes <= self.budget_bytes

        return largest(min(batch.rows, ANSWERED_TOGETHER), fits) or int(self.fits(replace(batch, rows=1)))

    @contextmanager
    def measuring(self, batch: AnswerBatch) -> Iterator[None]:
        """Watch while these are written."""
        with self.monitor.phase(ANSWERS):
            yield
        self._highest_bytes = max(self._highest_bytes, sum(self.predict(batch).values()))
        self.excess_bytes = max(0, self.monitor.phase_peaks[ANSWERS] - self._highest_bytes)


@dataclass(frozen=True)
class AnswerWriter:
    """Writes answers to many prompts, in the order of the prompts; the longest are answered first.

    Args:
        settings: how tokens are chosen.
        rows_at_once: how many of so many prompts of at most such a length, 1 at least. budget: measures what they take.
        tree: the answers that there are; None: any.
        parts: cuts long prompts; None: they are answered whole.
    """

    model: Blockwise
    settings: GenerateConfig
    rows_at_once: Callable[[AnswerBatch], int]
    seed: int = 0
    budget: AnswerBudget | None = None
    tree: AnswerTree | None = None
    parts: PromptParts | None = None

    def answers(self, inputs: list[list[int]]) -> list[list[int]]:
        """Token ids of one answer to each prompt: the best of a search with beams, else as tokens are drawn."""
        if self.parts is not None:
            return self.parts.answered(inputs, replace(self, parts=None).answers)
        if self.settings.num_beams > 1:
            return [best[0].tokens for best in self.best(inputs)]

        def draw(prompts: list[list[int]]) -> list[list[int]]:
            rows = [AnswerRow(ids, self.settings, self.seed) for ids in prompts]
            return write(decoder_of(self.model), rows, self.tree)

        return self._in_batches(draw, inputs)

    def best(self, inputs: list[list[int]]) -> list[list[ScoredAnswer]]:
        """The best answers to each prompt, as many as there are beams or fewer."""

        def search(prompts: list[list[int]]) -> list[list[ScoredAnswer]]:
            return generate_best(decoder_of(self.model, self.settings.num_beams), prompts, self.settings, self.tree)

        return self._in_batches(search, inputs)

    def ranked(self, inputs: list[list[int]], count: int) -> list[list[ScoredAnswer]]:
        """The `count` best answers to each prompt, or as many as there are; a single one is not scored and has 0."""
        if count == 1:
            return [[ScoredAnswer(tokens, 0.0)] for tokens in self.answers(inputs)]
        return [best[:count] for best in self.best(inputs)]

    def _in_batches(self, work: Callable[[list[list[int]]], list[Written]], inputs: list[list[int]]) -> list[Written]:
        """What `work` makes of prompts, the longest first."""
        order = sorted(range(len(inputs)), key=lambda row: -len(inputs[row]))
        answers: dict[int, Written] = {}
        while order:
            batch = AnswerBatch.by(self.settings, len(order), len(inputs[order[0]]))
            rows = order[: self.rows_at_once(batch)]
            with nullcontext() if self.budget is None else self.budget.measuring(replace(batch, rows=len(rows))):
                written = work([inputs[row] for row in rows])
            answers.update(zip(rows, written, strict=True))
            order = order[len(rows) :]
        return [answers[row] for row in range(len(inputs))]
