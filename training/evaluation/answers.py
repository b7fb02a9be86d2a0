"""Batched generation inside the memory budget: decides how many prompts are answered at once."""

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

Answer = TypeVar("Answer")
ANSWERS = "answers"  # The monitor records the memory peak of generation under this phase.


def new_decoder(model: Blockwise, num_beams: int = 1) -> Decoder:
    """A decoder of a model, with an empty cache."""
    store = model.weight_store
    return Decoder(model.model, store.for_products, store.compute_dtype, num_beams)


class AnswerBudget:
    """Keeps generation inside a budget: if batches take more than predicted, later predictions are raised by as much.

    Args:
        predict: peak memory of the process while a batch is answered: component -> bytes.
        budget_bytes: upper limit of that peak.
        monitor: measures the actual peak.
    """

    def __init__(self, predict: Callable[[AnswerBatch], dict[str, int]], budget_bytes: int, monitor: Monitor) -> None:
        self.predict = predict
        self.budget_bytes = budget_bytes
        self.monitor = monitor
        self.excess_bytes = 0  # The measured peak beyond the highest prediction so far.
        self._highest_prediction = 0

    def fits(self, batch: AnswerBatch) -> bool:
        """Whether a batch is predicted to fit; `excess_bytes` is left out."""
        return sum(self.predict(batch).values()) <= self.budget_bytes

    def most_rows(self, batch: AnswerBatch) -> int:
        """The most rows of a batch that fit, with `excess_bytes` added to the prediction.

        If not even one does, 1 where a row fits without `excess_bytes`, else 0.
        """

        def fits_with_excess(rows: int) -> bool:
            return sum(self.predict(replace(batch, rows=rows)).values()) + self.excess_bytes <= self.budget_bytes

        rows = largest(min(batch.rows, ANSWERED_TOGETHER), fits_with_excess)
        return rows or int(self.fits(replace(batch, rows=1)))

    @contextmanager
    def measuring(self, batch: AnswerBatch) -> Iterator[None]:
        """Measure the peak until the context ends, in which this batch is answered, and update `excess_bytes`."""
        with self.monitor.phase(ANSWERS):
            yield
        # The monitor keeps the peak of all batches so far, so it is compared with their highest prediction.
        self._highest_prediction = max(self._highest_prediction, sum(self.predict(batch).values()))
        self.excess_bytes = max(0, self.monitor.phase_peaks[ANSWERS] - self._highest_prediction)


@dataclass(frozen=True)
class AnswerWriter:
    """Generates answers to many prompts. Long prompts are answered first; results are in the order of the prompts.

    Args:
        settings: sampling and beam search.
        rows_at_once: how many rows of a batch to answer at once, at least 1.
        seed: of sampling.
        budget: measures each batch; None: nothing is measured.
        tree: restricts answers to a given list; None: any text is allowed.
        parts: splits long prompts and joins the answers to their parts; None: prompts are never split.
    """

    model: Blockwise
    settings: GenerateConfig
    rows_at_once: Callable[[AnswerBatch], int]
    seed: int = 0
    budget: AnswerBudget | None = None
    tree: AnswerTree | None = None
    parts: PromptParts | None = None

    def answers(self, inputs: list[list[int]]) -> list[list[int]]:
        """Token ids of one answer to each prompt: the best one of beam search, or else a greedy or sampled one."""
        if self.parts is not None:
            return self.parts.answer_in_parts(inputs, replace(self, parts=None).answers)
        if self.settings.num_beams > 1:
            return [best[0].tokens for best in self.best(inputs)]

        def generate(prompts: list[list[int]]) -> list[list[int]]:
            rows = [AnswerRow(ids, self.settings, self.seed) for ids in prompts]
            return write(new_decoder(self.model), rows, self.tree)

        return self._in_batches(generate, inputs)

    def best(self, inputs: list[list[int]]) -> list[list[ScoredAnswer]]:
        """The answers to each prompt that beam search found, best first; at most `num_beams`."""

        def search(prompts: list[list[int]]) -> list[list[ScoredAnswer]]:
            return generate_best(new_decoder(self.model, self.settings.num_beams), prompts, self.settings, self.tree)

        return self._in_batches(search, inputs)

    def ranked(self, inputs: list[list[int]], count: int) -> list[list[ScoredAnswer]]:
        """The `count` best answers to each prompt, or all if there are fewer. With `count` 1 the score is always 0."""
        if count == 1:
            return [[ScoredAnswer(tokens, 0.0)] for tokens in self.answers(inputs)]
        return [best[:count] for best in self.best(inputs)]

    def _in_batches(
        self, answer_batch: Callable[[list[list[int]]], list[Answer]], inputs: list[list[int]]
    ) -> list[Answer]:
        """Call `answer_batch` on batches of prompts, the longest first; answers in the order of `inputs`."""
        order = sorted(range(len(inputs)), key=lambda row: -len(inputs[row]))
        answers: dict[int, Answer] = {}
        while order:
            batch = AnswerBatch.by(self.settings, len(order), len(inputs[order[0]]))
            rows = order[: self.rows_at_once(batch)]
            with nullcontext() if self.budget is None else self.budget.measuring(replace(batch, rows=len(rows))):
                batch_answers = answer_batch([inputs[row] for row in rows])
            answers.update(zip(rows, batch_answers, strict=True))
            order = order[len(rows) :]
        return [answers[row] for row in range(len(inputs))]
