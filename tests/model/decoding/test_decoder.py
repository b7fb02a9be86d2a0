"""Rows that come and go are answered as each would be alone, padded side by side or by the compiled kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from devices.kernels.calls import kernels, use
from model.decoding.decoder import Decoder
from model.decoding.generation import generate
from model.decoding.sampling import AnswerRow, next_tokens
from model.t5 import T5
from settings.declared import GenerateConfig, T5ModelConfig
from tests.model.decoding.test_generation import ROWS, lively

LIMIT = 12
WITH_KERNELS = pytest.param(
    {"d_kv": 16}, marks=pytest.mark.skipif(kernels() is None, reason="no compiled kernels here")
)


def write(model: T5, prompts: Sequence[list[int]], begin_at: Sequence[int], **how: object) -> list[list[int]]:
    """Answers to prompts that join at different steps, and leave at their end token."""
    decoder, settings = Decoder(model), GenerateConfig(max_new_tokens=LIMIT, **how)  # type: ignore[arg-type]
    rows, running, eos = [AnswerRow(ids, settings, 3) for ids in prompts], list[AnswerRow](), model.config.eos_token_id
    for step in range(max(begin_at) + LIMIT):
        for number in (number for number, begin in enumerate(begin_at) if begin == step):
            decoder.join([prompts[number]], LIMIT)
            running.append(rows[number])
        if not running:
            continue
        tokens = next_tokens(running, decoder.step([(row.tokens or [0])[-1] for row in running]), model.config)
        for row, token in zip(running, tokens, strict=True):
            row.tokens += [token] if token != eos else []
        ended = {index for index, token in enumerate(tokens) if token == eos or len(running[index].tokens) == LIMIT}
        running = [running[index] for index in decoder.drop(ended)]
    return [row.tokens for row in rows]


@pytest.mark.parametrize("changes", [{"bias_in_every_layer": True, "feed_forward_proj": "gated-gelu"}, WITH_KERNELS])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_k": 9, "repetition_penalty": 2.0}])
def test_rows_come_and_go(config: T5ModelConfig, changes: dict[str, object], how: dict[str, object]) -> None:
    model = lively(config, **changes)
    prompts = [*ROWS, ROWS[0], [4, 1]]
    alone = [generate(model, [ids], max_new_tokens=LIMIT, seed=3, **how)[0] for ids in prompts]
    assert write(model, prompts, (0, 3, 5, 1, 14), **how) == alone


@pytest.mark.skipif(kernels() is None, reason="no compiled kernels here")
def test_with_kernels_a_row_is_the_same_bits_alone_and_among_others(config: T5ModelConfig) -> None:
    model = T5(dataclasses.replace(config, d_model=32, d_kv=16, d_ff=48)).initialise(0)
    prompts = [[*row[:-1]] * times + [1] for row in ROWS for times in (1, 7)]

    def last_of(prompts: list[list[int]]) -> torch.Tensor:
        decoder = Decoder(model)
        for ids in prompts:
            decoder.join([ids], 40)
        return [decoder.step([step] * len(prompts)) for step in range(30)][-1]

    together = last_of(prompts)
    for number, ids in enumerate(prompts):
        assert torch.equal(last_of([ids])[0], together[number])
    use(False)
    try:
        logits = last_of([prompts[1]])[0]
    finally:
        use(True)
    assert (logits - together[1]).norm() < 1e-4 * together[1].norm(), "as torch's own"
