"""Gradients are summed over processes, and a process that fails in the middle of a pass leaves nobody waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.blockwise import Blockwise, Schedule
from engine.loss_scaling import LossScaling
from engine.weights import weight_store_for
from model.loss import LossSettings
from tests.engine.small_models import Rectangle, small_model
from tests.ranks import must_succeed

CHILD = Path(__file__).with_name("children") / "all_reduce_child.py"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "failing_group",
    [
        "0",
        pytest.param("1", marks=slow),
        "3 hosts",
        pytest.param("7", marks=slow),  # This is the last group.
        pytest.param("update0", marks=slow),
        pytest.param("update3", marks=slow),
        pytest.param("update7", marks=slow),
    ],
)
def test_a_failed_process_stops_all_at_the_same_place(failing_group: str) -> None:
    must_succeed(CHILD, 2, *failing_group.split())


@pytest.mark.parametrize(("family", "dtypes"), [("t5", "float32 float16"), ("umt5", "bfloat16 float32")])
def test_who_aborts_a_pass_sends_what_the_others_send(family: str, dtypes: str) -> None:
    storage, compute = (getattr(torch, name) for name in dtypes.split())
    model = small_model(family)
    batch = Rectangle()
    for weight in model.parameters():
        if weight.dim() == 2 and weight.shape[0] != model.config.relative_attention_num_buckets:
            weight.data = weight.data.to(storage)
    model.embedding.requires_grad_(family != "umt5")
    blockwise = Blockwise(
        model, 0, weight_store_for(storage, compute), LossSettings(), 0.0, scaling=LossScaling(2.0**8)
    )

    def forms() -> list[tuple[object, ...]]:
        return [(w.grad.dtype, w.grad.shape) if w.grad is not None else () for w in model.parameters()]

    blockwise.gradients(batch.micro_batches(model, [[0, 1, 2, 3]]), batch.num_labels)
    expected = forms()
    for group in Schedule(model).backward():
        blockwise.zero_gradients(group)
    assert forms() == expected
    assert {weight.dtype for weight in model.parameters()} <= {torch.float32, storage}, "the wide copy has stayed"
