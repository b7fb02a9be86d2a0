"""Answers to many prompts inside the memory budget: the one place that decides how many of them are written at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from engine.blockwise import Blockwise
from memory.estimate.generation import AnswerBudget, Writing
from model.decoding.answer_tree import AnswerTree
from model.decoding.beam_search import ScoredAnswer
from model.decoding.decoder import Decoder
from model.decoding.generation import generate_best, write
from model.decoding.sampling import Row
from settings.declared import GenerateConfig
from training.evaluation.prompt_parts import PromptParts

Result = TypeVar("Result")


def decoder_of(model: Blockwise, num_beams: int = 1) -> Decoder:
    """A fresh decoder of a model."""
    store = model.weight_store
    return Decoder(model.model, store.for_products, store.compute_dtype, num_beams)


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
    rows_at_once: Callable[[Writing], int]
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

        def draw(numbers: list[int]) -> list[list[int]]:
            rows = [Row(inputs[number], self.settings, self.seed) for number in numbers]
            return write(decoder_of(self.model), rows, self.tree)

        return self._in_batches(draw, list(map(len, inputs)))

    def best(self, inputs: list[list[int]]) -> list[list[ScoredAnswer]]:
        """The best answers to each prompt, as many as there are beams or fewer."""

        def search(numbers: list[int]) -> list[list[ScoredAnswer]]:
            decoder = decoder_of(self.model, self.settings.num_beams)
            return generate_best(decoder, [inputs[number] for number in numbers], self.settings, self.tree)

        return self._in_batches(search, list(map(len, inputs)))

    def _in_batches(self, work: Callable[[list[int]], list[Result]], lengths: list[int]) -> list[Result]:
        """What `work` makes of prompts, by their numbers, the longest first; `lengths`: in tokens."""
        order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        answers = dict[int, Result]()
        while order:
            writing = Writing.by(self.settings, len(order), lengths[order[0]])
            rows = self.rows_at_once(writing)
            places, order = order[:rows], order[rows:]
            with nullcontext() if self.budget is None else self.budget.measuring(replace(writing, rows=len(places))):
                written = work(places)
            answers.update(zip(places, written, strict=True))
        return [answers[place] for place in range(len(lengths))]
