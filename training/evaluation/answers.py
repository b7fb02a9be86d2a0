"""Answers to many prompts inside the memory budget: the one place that decides how many of them are written at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

from config import GenerateConfig
from engine.blockwise import Blockwise
from memory.estimate.generation import AnswerBudget, Writing
from model.decoding.answer_tree import AnswerTree
from model.decoding.beam_search import ScoredAnswer
from model.decoding.generation import generate, generate_best

Result = TypeVar("Result")


def answer_all(
    blockwise: Blockwise,
    inputs: list[list[int]],
    settings: GenerateConfig,
    rows_at_once: Callable[[Writing], int],
    seed: int = 0,
    budget: AnswerBudget | None = None,
    tree: AnswerTree | None = None,
) -> list[list[int]]:
    """Token ids of the answers, in the order of the prompts; the longest prompts are answered first.

    Args:
        rows_at_once: how many of so many prompts of at most such a length, 1 at least. budget: measures what they take.
        tree: the answers that there are; None: any.
    """
    store = blockwise.weight_store
    write = partial(
        generate, blockwise.model, settings=settings, seed=seed, with_weights=store.for_products,
        compute_dtype=store.compute_dtype, tree=tree,
    )  # fmt: skip
    return _in_batches(write, inputs, settings, rows_at_once, budget)


def best_answers(
    blockwise: Blockwise,
    inputs: list[list[int]],
    settings: GenerateConfig,
    rows_at_once: Callable[[Writing], int],
    budget: AnswerBudget | None = None,
    tree: AnswerTree | None = None,
) -> list[list[ScoredAnswer]]:
    """The best answers to each prompt, as many as there are beams or fewer; arguments as of `answer_all`."""
    store = blockwise.weight_store
    write = partial(
        generate_best, blockwise.model, settings=settings, with_weights=store.for_products, compute_dtype=store.compute_dtype,
        tree=tree,
    )  # fmt: skip
    return _in_batches(write, inputs, settings, rows_at_once, budget)


def _in_batches(
    write: Callable[[list[list[int]]], list[Result]],
    inputs: list[list[int]],
    settings: GenerateConfig,
    rows_at_once: Callable[[Writing], int],
    budget: AnswerBudget | None,
) -> list[Result]:
    order = sorted(range(len(inputs)), key=lambda place: -len(inputs[place]))
    answers = dict[int, Result]()
    while order:
        writing = Writing.by(settings, len(order), len(inputs[order[0]]))
        rows = rows_at_once(writing)
        places, order = order[:rows], order[rows:]
        with nullcontext() if budget is None else budget.measuring(replace(writing, rows=len(places))):
            written = write([inputs[place] for place in places])
        answers.update(zip(places, written, strict=True))
    return [answers[place] for place in range(len(inputs))]
