"""Answers to many prompts inside the memory budget: the one place that decides how many of them are written at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from config import GenerateConfig
from engine.blockwise import Blockwise
from memory.estimate.generation import AnswerBudget, Writing
from model.decoding.generation import generate


def answer_all(
    blockwise: Blockwise,
    inputs: list[list[int]],
    settings: GenerateConfig,
    rows_at_once: Callable[[Writing], int],
    seed: int = 0,
    budget: AnswerBudget | None = None,
) -> list[list[int]]:
    """Token ids of the answers, in the order of the prompts; the longest prompts are answered first.

    Args:
        rows_at_once: how many of so many prompts of at most such a length, 1 at least. budget: measures what they take.
    """
    order = sorted(range(len(inputs)), key=lambda place: -len(inputs[place]))
    answers, store = [list[int]() for _ in inputs], blockwise.weight_store
    while order:
        writing = Writing.by(settings, len(order), len(inputs[order[0]]))
        rows = rows_at_once(writing)
        places, order = order[:rows], order[rows:]
        with nullcontext() if budget is None else budget.measuring(replace(writing, rows=len(places))):
            written = generate(
                blockwise.model, [inputs[place] for place in places], settings, seed=seed, with_weights=store.for_products,
                compute_dtype=store.compute_dtype,
            )  # fmt: skip
        for place, ids in zip(places, written, strict=True):
            answers[place] = ids
    return answers
