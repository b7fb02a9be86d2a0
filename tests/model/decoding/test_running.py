"""Rows that come and go are written as each would be alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from config import T5ModelConfig
from devices.kernels.calls import kernels, use
from model.decoding.generation import generate
from model.decoding.running import RunningBatch, RunningRow
from model.t5 import T5
from tests.model.decoding.test_generation import ROWS, build, lively

LIMIT = 12


def write(model: T5, prompts: Sequence[list[int]], begin_at: Sequence[int]) -> list[list[int]]:
    """Greedy answers to prompts that join at different steps, and leave at their end token."""
    batch, answers = RunningBatch(model, LIMIT), [[0] for _ in prompts]
    running: dict[int, RunningRow] = {}
    for step in range(max(begin_at) + LIMIT):
        for number in (number for number, begin in enumerate(begin_at) if begin == step):
            running[number] = batch.begin(batch.read(prompts[number]), LIMIT)
        if not running:
            continue
        logits = batch.step(list(running.values()), [answers[number][-1] for number in running])
        for number, token in zip(list(running), logits.argmax(1).tolist(), strict=True):
            answers[number].append(token)
            if token == model.config.eos_token_id or len(answers[number]) > LIMIT:
                del running[number]
    return [[token for token in answer[1:] if token != model.config.eos_token_id] for answer in answers]


@pytest.mark.parametrize(
    ("changes", "begin_at"),
    [({}, (0, 3, 5)), ({"bias_in_every_layer": True, "feed_forward_proj": "gated-gelu"}, (0, 14, 1))],
)
def test_rows_come_and_go(config: T5ModelConfig, changes: dict[str, object], begin_at: tuple[int, ...]) -> None:
    model = lively(config, **changes)
    assert write(model, ROWS, begin_at) == generate(model, ROWS, max_new_tokens=LIMIT)


@pytest.mark.skipif(kernels() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_kernels_a_row_is_the_same_bits_alone_and_among_others(config: T5ModelConfig, dtype: torch.dtype) -> None:
    model = T5(dataclasses.replace(config, d_model=32, d_kv=16, d_ff=48)).initialise(0).to(dtype)
    prompts = [[*row[:-1]] * times + [1] for row in ROWS for times in (1, 7)]
    together, alone = RunningBatch(model, 40), RunningBatch(model, 40)
    rows = [together.begin(together.read(ids), 40) for ids in prompts]
    for step in range(30):
        shown = together.step(rows, [step] * len(rows))
    for number, ids in enumerate(prompts):
        row = alone.begin(alone.read(ids), 40)
        for step in range(30):
            logits = alone.step([row], [step])
        if dtype == torch.float32:  # products in bf16 are torch's own, with bits of their own on some processors
            assert torch.equal(logits[0], shown[number])
        assert (logits[0] - shown[number]).norm() < 0.1 * shown[number].norm()
    use(False)
    try:
        plain = RunningBatch(model, 40)
        row = plain.begin(plain.read(prompts[1]), 40)
        for step in range(30):
            logits = plain.step([row], [step])
    finally:
        use(True)
    assert (logits[0] - shown[1]).norm() < (1e-4 if dtype == torch.float32 else 0.1) * shown[1].norm(), "as torch's own"


def test_a_prompt_is_read_once_for_several_rows(config: T5ModelConfig) -> None:
    model = build(config)
    batch = RunningBatch(model, LIMIT)
    source = batch.read(ROWS[0])
    rows = [batch.begin(source, 4), batch.begin(source, 7)]
    first = batch.step(rows, [0, 0])
    torch.testing.assert_close(first[0], first[1])
    after = batch.step(rows, [3, 5])
    for row, token in enumerate((3, 5)):
        expected = model.logits(torch.tensor([ROWS[0]]), torch.tensor([[0, token]]))[0, -1]
        torch.testing.assert_close(after[row], expected, rtol=1e-4, atol=1e-4)
    assert [row.own.shape[3] for row in rows] == [4, 7], "a row takes what its own answer may need"
