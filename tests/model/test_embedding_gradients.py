"""The gradient of an embedding is the sum over its tokens, rounded once, the same every time."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from engine.blockwise import Blockwise, Schedule, StackPass, keep_gradients
from engine.weights import weight_store_for
from model import embedding_gradients
from model.embedding_gradients import add_token_gradients
from model.loss import LossSettings
from model.micro_batch import MicroBatch
from model.rows import Rows
from tests.engine.small_models import small_model

VOCABULARY, WIDTH = 50, 24


def draw(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of which one is frequent, and gradients that do not cancel out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    ids[torch.rand(tokens, generator=generator) < 0.5] = 7
    return ids, torch.randn(tokens, WIDTH, generator=generator).add_(1.0).bfloat16()


@pytest.mark.parametrize(("dtype", "slab"), [(torch.bfloat16, 9000), (torch.float32, 1)])
def test_each_row_is_rounded_once(dtype: torch.dtype, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_gradients, "SUMMED_ELEMENTS", slab)
    parts = [draw(tokens, seed) for seed, tokens in enumerate((3000, 10, 1))]
    table = torch.full((VOCABULARY, WIDTH), 0.25, dtype=dtype)
    add_token_gradients(table, [ids for ids, _ in parts], [grad for _, grad in parts])
    exact = torch.full((VOCABULARY, WIDTH), 0.25, dtype=torch.float64)
    for ids, grad in parts:
        exact.index_add_(0, ids, grad.double())
    last_bit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    assert ((table.double() - exact).abs() <= last_bit * exact.abs() + 1e-5).all()


def test_a_pass_loses_no_token_in_bf16() -> None:
    """Of ones that are added to each other in bf16, only the first 256 count."""
    model = small_model().bfloat16()
    store = weight_store_for(torch.bfloat16, torch.bfloat16)
    ids, rows = torch.full((1000,), 9), Rows((1000,))
    micro_batches, schedule = [MicroBatch(ids, ids, ids, rows, rows)] * 2, Schedule(model)
    blockwise = Blockwise(model, 99, store, LossSettings(), 0.0)
    stack_pass = StackPass(blockwise, schedule.stacks[0], micro_batches, deque(), with_backward=True)
    gradients = deque(torch.ones(1000, model.config.d_model, dtype=torch.bfloat16) for _ in range(2))
    stack_pass.backward(gradients, keep_gradients)
    assert model.embedding.grad is not None
    assert (model.embedding.grad[9] == 2000).all() and model.embedding.grad.sum() == 2000 * model.config.d_model
    assert not gradients, "they are not held any longer than that"
