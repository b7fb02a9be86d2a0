"""Rows of any length meet few shapes: libraries keep something for each new one that a product, softmax or norm
sees.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from data.batches.collate import Row, collate
from engine.blockwise import Blockwise
from engine.step import to_micro_batch
from engine.weights import WeightStore
from memory.estimate.shapes import Shapes, Sizes
from model.loss import LossSettings
from tests.engine.small_models import small_model

COUNTED = ("mm", "softmax", "norm", "vecdot")
MOST = 80  # shapes of one operator: eight products of a block at each of nine or ten sizes


class Counting(TorchDispatchMode):
    """Notes the step in which each operator first saw each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.first = 0, defaultdict[str, dict[Any, int]](dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if any(word in name for word in COUNTED):
            shapes = tuple(tuple(each.shape) for each in args if isinstance(each, Tensor))
            self.first[name].setdefault(shapes, self.step)
        return func(*args, **(kwargs or {}))


def lengths(kind: str, steps: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the rows of steps, (steps, rows) each: pairs as people write them, or words."""
    draw = np.random.default_rng(1)
    if kind == "words":
        return draw.integers(4, 15, (steps, rows)), draw.integers(4, 15, (steps, rows))
    sources, targets = (np.exp(draw.normal(mean, 0.8, (steps, rows))) for mean in (3.2, 4.6))
    return sources.astype(int).clip(2, 320), targets.astype(int).clip(2, 320)


def met(kind: str, steps: int, rows: int, batch_size: int, d_kv: int = 16) -> Counting:
    sources, targets = lengths(kind, steps, rows)
    sizes: Sizes = Shapes(sources, targets).sizes(batch_size)
    model = small_model(d_model=32, d_kv=d_kv, d_ff=48, num_heads=8, num_layers=1, num_decoder_layers=1)
    blockwise = Blockwise(model, 9, WeightStore(torch.float32), LossSettings(), 0.0)
    with Counting() as counting:
        for counting.step in range(steps):
            pairs = zip(sources[counting.step], targets[counting.step], strict=True)
            made = [Row(np.full(s, 3), np.full(t, 4), number) for number, (s, t) in enumerate(pairs)]
            parts = [
                to_micro_batch(collate(made[at : at + batch_size], 0), model.config, torch.device("cpu"), sizes)
                for at in range(0, rows, batch_size)
            ]
            blockwise.gradients(parts, 100)
            model.zero_grad(set_to_none=True)
    return counting


def check(counting: Counting, settled: int) -> None:
    for name, first in counting.first.items():
        assert len(first) <= MOST, f"{name} met {len(first)} shapes"
        late = sum(step > settled for step in first.values())
        assert late <= 2, f"{name} met {late} shapes after step {settled}"  # a row longer than any before


@pytest.mark.parametrize("d_kv", [16, 4], ids=["as compiled kernels take them", "dense"])
def test_words_meet_few_shapes(d_kv: int) -> None:
    check(met("words", 20, 64, 64, d_kv), settled=15)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "rows", "batch_size"), [("pairs", 16, 16), ("pairs", 16, 4), ("words", 256, 256)])
def test_a_thousand_steps_meet_few_shapes(kind: str, rows: int, batch_size: int) -> None:
    check(met(kind, 1000 if kind == "pairs" else 200, rows, batch_size), settled=100)
