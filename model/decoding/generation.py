"""How does a model write an answer? It runs the encoder once, then token by token, by one of three ways.

Greedy and sampled answers take one token a step (`choosing`); beam search keeps several beginnings (`beams`). All of them
stand on `decoding`, which holds what was computed before. Rows leave the batch at their end token, and no answer depends
on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from config import GenerateConfig
from model.decoding.beams import BeamSettings, search
from model.decoding.choosing import Choice, Penalties
from model.decoding.kv_cache import Decoding
from model.decoding.passing import WithWeights, in_place
from model.t5 import T5

__all__ = ["generate", "is_cut", "stream"]


def generate(
    model: T5,
    input_ids: Sequence[Sequence[int]],
    settings: GenerateConfig | None = None,
    *,
    seed: int = 0,
    with_weights: WithWeights = in_place,
    compute_dtype: torch.dtype | None = None,
    **changes: Any,
) -> list[list[int]]:
    """Write an answer to each row.

    Args:
        input_ids: one list of token ids a row, with its end token.
        settings: how tokens are chosen; None: the defaults, greedy.
        seed: of sampling, see `Choice`.
        with_weights, compute_dtype: see `Decoding`.
        changes: settings by name, such as max_new_tokens=20.
    Returns:
        token ids of each answer, without the start token and without the end token.
    Raises:
        UserError: an id outside of the vocabulary.
    Memory: see `Decoding`; T is at most twice the longest answer, 64 at least, max_new_tokens at most. A search holds
        three times the logits besides.
    """
    answers: list[list[int]] = [[] for _ in input_ids]
    if not answers:
        return answers
    settings = replace(settings or GenerateConfig(), **changes)
    decoding = _decoding(model, input_ids, settings, with_weights, compute_dtype)
    if settings.num_beams > 1:
        return search(decoding, _beam_settings(settings), _penalties(settings, model))
    for tokens in _write(decoding, input_ids, settings, seed):
        for row, token in tokens:
            answers[row].append(token)
    return answers


def is_cut(answer: Sequence[int], settings: GenerateConfig) -> bool:
    """Whether an answer was ended by its longest length: the end token would have been one more."""
    return len(answer) >= settings.max_new_tokens


def stream(
    model: T5,
    input_ids: Sequence[int],
    settings: GenerateConfig | None = None,
    *,
    seed: int = 0,
    with_weights: WithWeights = in_place,
    compute_dtype: torch.dtype | None = None,
    **changes: Any,
) -> Iterator[int]:
    """Yield the tokens of the answer to one row as they are chosen; the same tokens as `generate`, same arguments.

    A beam search knows its answer at the end: then all tokens come at once.
    """
    settings = replace(settings or GenerateConfig(), **changes)
    decoding = _decoding(model, [input_ids], settings, with_weights, compute_dtype)
    if settings.num_beams > 1:
        yield from search(decoding, _beam_settings(settings), _penalties(settings, model))[0]
        return
    for tokens in _write(decoding, [input_ids], settings, seed):
        yield tokens[0][1]


def _decoding(
    model: T5,
    input_ids: Sequence[Sequence[int]],
    settings: GenerateConfig,
    with_weights: WithWeights,
    compute_dtype: torch.dtype | None,
) -> Decoding:
    return Decoding(model, input_ids, with_weights, compute_dtype, settings.num_beams, settings.max_new_tokens)


def _beam_settings(settings: GenerateConfig) -> BeamSettings:
    return BeamSettings(
        settings.num_beams, settings.max_new_tokens, settings.length_penalty, settings.early_stopping.lower()
    )


def _penalties(settings: GenerateConfig, model: T5) -> Penalties:
    return Penalties(
        settings.repetition_penalty, settings.no_repeat_ngram_size, settings.min_new_tokens, model.config.eos_token_id
    )


@torch.no_grad()
def _write(
    decoding: Decoding, inputs: Sequence[Sequence[int]], settings: GenerateConfig, seed: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield (row, token) of all rows still being written, step by step; rows leave at their end token."""
    config, device = decoding.model.config, decoding.device
    choice = Choice(settings.temperature, settings.top_k, settings.top_p, seed)
    penalties = _penalties(settings, decoding.model)
    alive = list(range(len(inputs)))
    generators = [choice.generator(ids) for ids in inputs]
    ids = torch.full((len(alive),), config.start_token_id, device=device)
    written: Tensor | None = ids.unsqueeze(1) if penalties.need_history else None
    for count in range(settings.max_new_tokens):
        ids = choice(penalties(decoding.step(ids), written, count), generators)
        if written is not None:
            written = torch.cat([written, ids.unsqueeze(1)], 1)
        going = [place for place, token in enumerate(ids.tolist()) if token != config.eos_token_id]
        if len(going) < len(alive):
            alive, generators = [alive[place] for place in going], [generators[place] for place in going]
            if not alive:
                return
            places = torch.tensor(going, device=device)
            ids, written = ids[places], None if written is None else written[places]
            decoding.select(places)
        yield list(zip(alive, ids.tolist(), strict=True))
