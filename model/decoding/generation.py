"""Answers to prompts: greedy or drawn, token by token, or found by a beam search. Rows leave the batch at their end
token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from model.decoding.answer_tree import AnswerTree
from model.decoding.beam_search import ScoredAnswer, search
from model.decoding.decoder import Decoder
from model.decoding.sampling import AnswerRow, next_tokens
from model.t5 import T5, WithWeights, in_place
from settings.declared import GenerateConfig


def generate(
    model: T5,
    input_ids: Sequence[Sequence[int]],
    settings: GenerateConfig | None = None,
    *,
    seed: int = 0,
    with_weights: WithWeights = in_place,
    compute_dtype: torch.dtype | None = None,
    tree: AnswerTree | None = None,
    **changes: Any,
) -> list[list[int]]:
    """Write an answer to each row.

    Args:
        input_ids: one list of token ids a row, with its end token.
        settings: how tokens are chosen; None: the defaults, greedy.
        seed: of sampling, see `AnswerRow`.
        with_weights, compute_dtype: see `Decoder`.
        tree: the answers that there are; their lengths replace `max_new_tokens`, and no penalty applies. None: any.
        changes: settings by name, such as max_new_tokens=20.
    Returns:
        token ids of each answer, without the start token and without the end token.
    Raises:
        UserError: an id outside of the vocabulary.
    Memory: see `Decoder`; a search holds three times the logits besides.
    """
    settings = replace(settings or GenerateConfig(), **changes)
    decoder = Decoder(model, with_weights, compute_dtype, settings.num_beams)
    if settings.num_beams > 1:
        return [best[0].tokens for best in generate_best(decoder, input_ids, settings, tree)]
    return write(decoder, [AnswerRow(ids, settings, seed) for ids in input_ids], tree)


def generate_best(
    decoder: Decoder, input_ids: Sequence[Sequence[int]], settings: GenerateConfig, tree: AnswerTree | None = None
) -> list[list[ScoredAnswer]]:
    """The best answers to each row, `num_beams` or fewer, with their log-probabilities, by a fresh decoder."""
    return search(decoder, input_ids, _within(settings, tree), tree)


def write(decoder: Decoder, rows: Sequence[AnswerRow], tree: AnswerTree | None = None) -> list[list[int]]:
    """The answers of rows whose longest answers are alike, greedy or drawn, by a fresh decoder without beams."""
    for _ in _steps(decoder, rows, tree):
        pass
    return [row.tokens for row in rows]


def _within(settings: GenerateConfig, tree: AnswerTree | None) -> GenerateConfig:
    return settings if tree is None else replace(settings, max_new_tokens=tree.longest)


def stream(
    decoder: Decoder,
    input_ids: Sequence[int],
    settings: GenerateConfig,
    *,
    seed: int = 0,
    tree: AnswerTree | None = None,
) -> Iterator[int]:
    """Yield the tokens of the answer to one row as they are chosen, by a fresh decoder; the same tokens as `generate`.

    A beam search knows its answer at the end: then all tokens come at once.
    """
    if settings.num_beams > 1:
        yield from generate_best(decoder, [input_ids], settings, tree)[0][0].tokens
        return
    row = AnswerRow(input_ids, settings, seed)
    for count, _ in enumerate(_steps(decoder, [row], tree)):
        yield from row.tokens[count:]


def _steps(decoder: Decoder, rows: Sequence[AnswerRow], tree: AnswerTree | None) -> Iterator[None]:
    """Write the answers of rows, a token of each a step."""
    shape = decoder.shape
    going = list(rows)
    for row in going:
        row.settings = _within(row.settings, tree)
    if going:
        decoder.join([row.ids for row in going], going[0].settings.max_new_tokens)
    while going:
        newest = [[shape.start_token_id, *row.tokens][-1] for row in going]
        choices = None if tree is None else tree.choices(np.array([row.node for row in going]), shape.vocab_size)
        logits = decoder.step(newest, choices)
        tokens = next_tokens(going, logits, shape, choices)
        del logits
        ended = set[int]()
        for index, (row, token) in enumerate(zip(going, tokens, strict=True)):
            row.tokens.append(token)
            if tree is not None:
                row.tokens += tree.tail(row.node)
            if row.tokens[-1] == shape.eos_token_id:
                row.tokens.pop()
                ended.add(index)
            elif is_cut(row.tokens, row.settings):
                ended.add(index)
        yield
        going = [going[index] for index in decoder.drop(ended)]


def is_cut(answer: Sequence[int], settings: GenerateConfig) -> bool:
    """Whether an answer was ended by its longest length: the end token would have been one more."""
    return len(answer) >= settings.max_new_tokens
