"""Answers to many prompts inside the memory budget: the one place that decides how many of them are written at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

from config import GenerateConfig
from engine.blockwise import Blockwise
from memory.estimate.generation import AnswerBudget, Writing
from model.decoding.answer_tree import AnswerTree
from model.decoding.beam_search import ScoredAnswer
from model.decoding.decoder import Decoder
from model.decoding.generation import generate_best, write
from model.decoding.sampling import Row
from training.evaluation.minimum_bayes_risk import most_agreed

Result = TypeVar("Result")
CANDIDATE_BEAMS = 4  # of a search for candidates where nothing else is asked for
TEMPERATURES = (0.6, 0.8, 1.0)  # at which candidates are drawn in turn, likewise
CANDIDATES_HELD = 512  # of several prompts, at least those of one


def decoder_of(models: Sequence[Blockwise], num_beams: int = 1) -> Decoder:
    """A fresh decoder of a model, or of an ensemble."""
    first, *others = models
    store, beside = first.weight_store, [decoder_of([other], num_beams) for other in others]
    return Decoder(first.model, store.for_products, store.compute_dtype, num_beams, beside)


def answer_all(
    models: Sequence[Blockwise],
    inputs: list[list[int]],
    settings: GenerateConfig,
    rows_at_once: Callable[[Writing], int],
    seed: int = 0,
    budget: AnswerBudget | None = None,
    tree: AnswerTree | None = None,
) -> list[list[int]]:
    """Token ids of the answers, in the order of the prompts; the longest prompts are answered first.

    Args:
        models: one, or an ensemble.
        rows_at_once: how many of so many prompts of at most such a length, 1 at least. budget: measures what they take.
        tree: the answers that there are; None: any.
    """
    if settings.num_beams > 1:
        found = best_answers(models, inputs, settings, rows_at_once, budget, tree)
        return [best[0].tokens for best in found]

    def answer(places: list[int]) -> list[list[int]]:
        return write(decoder_of(models), [Row(inputs[place], settings, seed) for place in places], tree)

    return _in_batches(answer, [len(ids) for ids in inputs], settings, rows_at_once, budget)


def best_answers(
    models: Sequence[Blockwise],
    inputs: list[list[int]],
    settings: GenerateConfig,
    rows_at_once: Callable[[Writing], int],
    budget: AnswerBudget | None = None,
    tree: AnswerTree | None = None,
) -> list[list[ScoredAnswer]]:
    """The best answers to each prompt, as many as there are beams or fewer; arguments as of `answer_all`."""

    def search(places: list[int]) -> list[list[ScoredAnswer]]:
        return generate_best(
            decoder_of(models, settings.num_beams), [inputs[place] for place in places], settings, tree
        )

    return _in_batches(search, [len(ids) for ids in inputs], settings, rows_at_once, budget)


def agreed_answers(
    models: Sequence[Blockwise],
    inputs: list[list[int]],
    settings: GenerateConfig,
    count: int,
    choose_by: str,
    decode: Callable[[Sequence[int]], str],
    rows_at_once: Callable[[Writing], int],
    seed: int = 0,
    budget: AnswerBudget | None = None,
    tree: AnswerTree | None = None,
) -> list[list[int]]:
    """The candidate that agrees most with the others, for each prompt; further arguments as of `answer_all`.

    Args:
        models: each of them writes its share of the candidates.
        settings: with beams, so many candidates are those of a search; with a temperature, the others are drawn at it.
        count: candidates of a prompt. choose_by: see `most_agreed`. decode: turns token ids into text.
    Memory: the candidates of some prompts, `CANDIDATES_HELD` in all.
    """
    answers, order = dict[int, list[int]](), sorted(range(len(inputs)), key=lambda place: -len(inputs[place]))
    at_once = max(1, CANDIDATES_HELD // count)
    for first in range(0, len(order), at_once):
        places = order[first : first + at_once]
        candidates = [list[list[int]]() for _ in places]
        for number, model in enumerate(models):
            share = count // len(models) + (number < count % len(models))
            found = _candidates(
                model, [inputs[place] for place in places], settings, share, rows_at_once, seed + number * count, budget, tree
            )  # fmt: skip
            candidates = [held + more for held, more in zip(candidates, found, strict=True)]
        for place, held in zip(places, candidates, strict=True):
            answers[place] = held[most_agreed([decode(tokens) for tokens in held], choose_by)]
    return [answers[place] for place in range(len(inputs))]


def _candidates(
    model: Blockwise, inputs: list[list[int]], settings: GenerateConfig, count: int, rows_at_once: Callable[[Writing], int],
    seed: int, budget: AnswerBudget | None, tree: AnswerTree | None,
) -> list[list[list[int]]]:  # fmt: skip
    """`count` answers to each prompt: those of a search, best first, then drawn ones."""
    if not count:
        return [[] for _ in inputs]
    beams = settings.num_beams if settings.num_beams > 1 else max(1, min(CANDIDATE_BEAMS, count // 2))
    if beams > 1:
        searching = replace(settings, num_beams=beams, temperature=0.0)
        best = best_answers([model], inputs, searching, rows_at_once, budget, tree)
        found = [[answer.tokens for answer in answers[:count]] for answers in best]
    else:
        greedy = replace(settings, temperature=0.0)
        found = [[answer] for answer in answer_all([model], inputs, greedy, rows_at_once, seed, budget, tree)]
    temperatures = (settings.temperature,) if settings.temperature else TEMPERATURES
    ways = [replace(settings, num_beams=1, temperature=temperature) for temperature in temperatures]
    draws = [(place, way) for place, held in enumerate(found) for way in range(count - len(held))]

    def draw(numbers: list[int]) -> list[list[int]]:
        asked = (draws[number] for number in numbers)
        rows = [Row(inputs[place], ways[way % len(ways)], seed + way) for place, way in asked]
        return write(decoder_of([model]), rows, tree)

    drawn = _in_batches(draw, [len(inputs[place]) for place, _ in draws], ways[0], rows_at_once, budget)
    for (place, _), answer in zip(draws, drawn, strict=True):
        found[place].append(answer)
    return found


def _in_batches(
    write: Callable[[list[int]], list[Result]],
    lengths: list[int],
    settings: GenerateConfig,
    rows_at_once: Callable[[Writing], int],
    budget: AnswerBudget | None,
) -> list[Result]:
    """What `write` makes of prompts, by their numbers, the longest first.

    Args:
        lengths: of the prompts, in tokens.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    answers = dict[int, Result]()
    while order:
        writing = Writing.by(settings, len(order), lengths[order[0]])
        rows = rows_at_once(writing)
        places, order = order[:rows], order[rows:]
        with nullcontext() if budget is None else budget.measuring(replace(writing, rows=len(places))):
            written = write(places)
        answers.update(zip(places, written, strict=True))
    return [answers[place] for place in range(len(lengths))]
