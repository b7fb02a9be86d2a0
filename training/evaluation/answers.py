"""Answers to many prompts inside the memory budget: the one place that decides how many of them are written at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from engine.blockwise import Blockwise
from memory.estimate.generation import AnswerBudget, Writing
from model.decoding.answer_tree import AnswerTree
from model.decoding.beam_search import ScoredAnswer
from model.decoding.decoder import Decoder
from model.decoding.generation import generate_best, write
from model.decoding.sampling import Row
from settings.declared import GenerateConfig
from training.evaluation.minimum_bayes_risk import most_agreed
from training.evaluation.prompt_parts import PromptParts

Result = TypeVar("Result")
CANDIDATE_BEAMS = 4  # of a search for candidates where nothing else is asked for
TEMPERATURES = (0.6, 0.8, 1.0)  # at which candidates are drawn in turn, likewise
CANDIDATES_HELD = 512  # of several prompts, at least those of one


def decoder_of(models: Sequence[Blockwise], num_beams: int = 1) -> Decoder:
    """A fresh decoder of a model, or of an ensemble."""
    first, *others = models
    store, beside = first.weight_store, [decoder_of([other], num_beams) for other in others]
    return Decoder(first.model, store.for_products, store.compute_dtype, num_beams, beside)


def weighted(best: Sequence[ScoredAnswer], drawn: Sequence[list[int]]) -> list[tuple[list[int], float]]:
    """Candidates and their weights, 1 in all, so that the unlikely answers of a search do not outvote the likely one.

    Each drawn answer has an equal share, as has the search once. Drawn ones that the search has found leave theirs to it,
    and its answers share all that by their probabilities.
    """
    others = [tokens for tokens in drawn if all(tokens != answer.tokens for answer in best)]
    logs = np.array([answer.log_probability for answer in best])
    share = 1 / (len(drawn) + 1)
    weights = (1 - share * len(others)) * np.exp(logs - np.logaddexp.reduce(logs))
    searched = [(answer.tokens, weight) for answer, weight in zip(best, weights.tolist(), strict=True)]
    return [*searched, *((tokens, share) for tokens in others)]


@dataclass(frozen=True)
class AnswerWriter:
    """Writes answers to many prompts, in the order of the prompts; the longest are answered first.

    Args:
        models: one, or an ensemble. settings: how tokens are chosen.
        rows_at_once: how many of so many prompts of at most such a length, 1 at least. budget: measures what they take.
        tree: the answers that there are; None: any.
        parts: cuts long prompts; None: they are answered whole.
    """

    models: Sequence[Blockwise]
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
        return self._drawn([(ids, self.settings, self.seed) for ids in inputs])

    def best(self, inputs: list[list[int]]) -> list[list[ScoredAnswer]]:
        """The best answers to each prompt, as many as there are beams or fewer."""

        def search(numbers: list[int]) -> list[list[ScoredAnswer]]:
            decoder = decoder_of(self.models, self.settings.num_beams)
            return generate_best(decoder, [inputs[number] for number in numbers], self.settings, self.tree)

        return self._in_batches(search, list(map(len, inputs)))

    def agreed(
        self, inputs: list[list[int]], count: int, choose_by: str, decode: Callable[[Sequence[int]], str]
    ) -> list[list[int]]:
        """The candidate that agrees most with the others, for each prompt; each model writes its share of them.

        With beams, so many candidates are those of a search; with a temperature, the others are drawn at it.

        Args:
            count: candidates of a prompt. choose_by: see `most_agreed`. decode: turns token ids into text.
        Memory: the candidates of some prompts, `CANDIDATES_HELD` in all.
        """
        if self.parts is not None:
            whole = replace(self, parts=None)
            return self.parts.answered(inputs, lambda split: whole.agreed(split, count, choose_by, decode))
        answers, order = dict[int, list[int]](), sorted(range(len(inputs)), key=lambda place: -len(inputs[place]))
        at_once = max(1, CANDIDATES_HELD // count)
        for first in range(0, len(order), at_once):
            places = order[first : first + at_once]
            candidates = [list[tuple[list[int], float]]() for _ in places]
            for number, model in enumerate(self.models):
                share = count // len(self.models) + (number < count % len(self.models))
                one = replace(self, models=[model], seed=self.seed + number * count)
                found = one._candidates([inputs[place] for place in places], share)
                candidates = [held + more for held, more in zip(candidates, found, strict=True)]
            for place, held in zip(places, candidates, strict=True):
                tokens_of, weights = dict[str, list[int]](), defaultdict[str, float](float)
                for tokens, weight in held:
                    text = decode(tokens)
                    tokens_of.setdefault(text, tokens)
                    weights[text] += weight
                answers[place] = tokens_of[most_agreed(weights, choose_by)]
        return [answers[place] for place in range(len(inputs))]

    def _candidates(self, inputs: list[list[int]], count: int) -> list[list[tuple[list[int], float]]]:
        """Up to `count` answers to each prompt, those of a search, best first, then drawn ones; with their weights."""
        if not count:
            return [[] for _ in inputs]
        settings = self.settings
        beams = settings.num_beams if settings.num_beams > 1 else max(2, min(CANDIDATE_BEAMS, count // 2))
        certain = replace(self, settings=replace(settings, num_beams=beams, temperature=0.0))
        found = [best[:count] for best in certain.best(inputs)]
        temperatures = (settings.temperature,) if settings.temperature else TEMPERATURES
        ways = [replace(settings, num_beams=1, temperature=temperature) for temperature in temperatures]
        draws = [(place, way) for place, best in enumerate(found) for way in range(count - len(best))]
        asked = [(inputs[place], ways[way % len(ways)], self.seed + way) for place, way in draws]
        drawn = [list[list[int]]() for _ in inputs]
        for (place, _), answer in zip(draws, replace(self, settings=ways[0])._drawn(asked), strict=True):
            drawn[place].append(answer)
        return [weighted(best, others) for best, others in zip(found, drawn, strict=True)]

    def _drawn(self, asked: Sequence[tuple[list[int], GenerateConfig, int]]) -> list[list[int]]:
        """One answer without beams to each prompt, by its own settings and seed."""

        def draw(places: list[int]) -> list[list[int]]:
            return write(decoder_of(self.models), [Row(*asked[place]) for place in places], self.tree)

        return self._in_batches(draw, [len(ids) for ids, _, _ in asked])

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
