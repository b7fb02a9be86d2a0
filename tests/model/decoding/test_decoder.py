"""Rows that come and go are answered as each would be alone, padded side by side or by the compiled kernel."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch

from devices.kernels.calls import kernels, use
from model.decoding.decoder import Decoder
from model.decoding.generation import generate
from model.decoding.sampling import AnswerRow, next_tokens
from model.t5 import T5
from settings.declared import GenerateConfig, T5ModelConfig
from tests.model.decoding.test_generation import ROWS, build, lively

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


@pytest.mark.parametrize(
    "changes", [{}, {"bias_in_every_layer": True, "feed_forward_proj": "gated-gelu"}, WITH_KERNELS]
)
@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}, {"repetition_penalty": 2.0}])
def test_rows_come_and_go(config: T5ModelConfig, changes: dict[str, object], how: dict[str, object]) -> None:
    model = lively(config, **changes)
    prompts = [*ROWS, ROWS[0], [4, 1]]
    alone = [generate(model, [ids], max_new_tokens=LIMIT, seed=3, **how)[0] for ids in prompts]
    assert write(model, prompts, (0, 3, 5, 1, 14), **how) == alone


@pytest.mark.skipif(kernels() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_kernels_a_row_is_the_same_bits_alone_and_among_others(config: T5ModelConfig, dtype: torch.dtype) -> None:
    model = T5(dataclasses.replace(config, d_model=32, d_kv=16, d_ff=48)).initialise(0).to(dtype)
    prompts = [[*row[:-1]] * times + [1] for row in ROWS for times in (1, 7)]

    def last_of(prompts: list[list[int]]) -> torch.Tensor:
        decoder = Decoder(model)
        for ids in prompts:
            decoder.join([ids], 40)
        return [decoder.step([step] * len(prompts)) for step in range(30)][-1]

    together = last_of(prompts)
    for number, ids in enumerate(prompts):
        logits = last_of([ids])[0]
        if dtype == torch.float32:  # products in bf16 are torch's own, with bits of their own on some processors
            assert torch.equal(logits, together[number])
        assert (logits - together[number]).norm() < 0.1 * together[number].norm()
    use(False)
    try:
        logits = last_of([prompts[1]])[0]
    finally:
        use(True)
    assert (logits - together[1]).norm() < (1e-4 if dtype == torch.float32 else 0.1) * together[1].norm(), (
        "as torch's own"
    )


def test_a_prompt_that_is_being_answered_is_not_read_again(
    config: T5ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(config)
    decoder, read = Decoder(model), list[object]()
    encode = decoder._encode
    monkeypatch.setattr(decoder, "_encode", lambda *arguments: read.append(arguments) or encode(*arguments))
    for _ in range(2):
        decoder.join([ROWS[0]], 4)
    first = decoder.step([0, 0])
    torch.testing.assert_close(first[0], first[1])
    after = decoder.step([3, 5])
    for row, token in enumerate((3, 5)):
        expected = model.logits(torch.tensor([ROWS[0]]), torch.tensor([[0, token]]))[0, -1]
        torch.testing.assert_close(after[row], expected, rtol=1e-4, atol=1e-4)
    assert len(read) == 1


def test_no_more_is_held_than_was_foreseen(config: T5ModelConfig) -> None:
    """Rows of any length and limit join where `tokens_with` allows it, and leave."""
    draw, decoder, most = random.Random(0), Decoder(build(config)), 700
    cache = decoder.cache
    for _ in range(60):
        prompt, limit = [5] * draw.choice((3, 30, 90)) + [1], draw.choice((8, 70, 150))
        if not cache.sources or cache.tokens_with([len(prompt)], [limit]) <= most:
            decoder.join([prompt], limit)
        for _ in range(draw.choice((1, 9, 40))):
            decoder.step([2] * len(cache.sources))
            assert (
                sum(buffers[0][0].shape[0] * buffers[0][0].shape[2] for buffers in (cache._source, cache._own)) <= most
            )
            full = {
                row
                for row, (length, most_) in enumerate(zip(cache.lengths, cache.limits, strict=True))
                if length == most_
            }
            decoder.drop(full | ({0} if draw.random() < 0.05 else set()))
            if not cache.sources:
                break
