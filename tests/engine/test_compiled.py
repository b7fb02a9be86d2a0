"""Blocks compiled by torch give the losses and gradients of blocks as they are; one set of graphs serves all steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from devices.base import CUDA, override_traits
from devices.kernels import calls
from engine.compiled import compile_parts
from model.block_parts import BlockParts
from tests.engine.small_models import (
    Rectangle,
    assert_near,
    blockwise_of,
    rectangle_gradients,
    reference_gradients,
    small_model,
)

pytestmark = [  # Torch's own compiler raises these, and hides them or not.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
GPU = replace(CUDA, is_fused=False)  # A CPU has none of its kernels.


@pytest.fixture(autouse=True)
def dense_rows() -> Iterator[None]:
    torch.compiler.reset()
    calls.use(False)
    with override_traits("cpu", GPU):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("family", "activation", "saved", "backend"),
    [("t5", "relu", 2, "aot_eager"), ("t5-v1.1", "gated-gelu", 0, "eager"), ("umt5", "gated-silu", 99, "eager")],
)
def test_gradients_are_those_of_the_plain_model(family: str, activation: str, saved: int, backend: str) -> None:
    model = small_model(family, feed_forward_proj=activation)
    blockwise = blockwise_of(model, saved, parts=compile_parts(backend))
    assert_near(rectangle_gradients(blockwise, Rectangle()), reference_gradients(model, Rectangle()))


def test_recomputed_blocks_drop_what_they_dropped_and_steps_of_any_length_run_the_same_graphs() -> None:
    model = small_model("t5-v1.1")
    parts = compile_parts("eager")
    expected = rectangle_gradients(blockwise_of(model, 99, rate=0.3, parts=BlockParts()), Rectangle())
    compiled = blockwise_of(model, 2, rate=0.3, parts=parts)
    assert_near(rectangle_gradients(compiled, Rectangle()), expected)
    other_mask, _ = rectangle_gradients(blockwise_of(model, rate=0.3), Rectangle())
    assert other_mask != pytest.approx(expected[0], rel=1e-3)
    assert float(compiled.loss(Rectangle().micro_batches(model, [[0, 1, 2, 3]]))) > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, source, target in ((4, 90, 9), (7, 30, 60), (5, 4, 3)):
            rectangle_gradients(compiled, Rectangle(rows, source, target))
