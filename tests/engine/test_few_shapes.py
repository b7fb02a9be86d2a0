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
from engine.step import to_micro_batch
from memory.estimate.shapes import Shapes, Sizes
from settings.declared import T5ModelConfig
from tests.engine.small_models import blockwise_of, small_model

COUNTED = ("mm", "softmax", "norm", "vecdot")
MOST = 80  # shapes of one operator: eight products of a block at each of nine or ten sizes


class Counting(TorchDispatchMode):
    """Notes the step in which each operator first saw each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.first = defaultdict[str, dict[Any, int]](dict)

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
    blockwise = blockwise_of(model, 9)
    with Counting() as counting:
        for counting.step in range(steps):
            pairs = zip(sources[counting.step], targets[counting.step], strict=True)
            batch = [Row(np.full(s, 3), np.full(t, 4), number) for number, (s, t) in enumerate(pairs)]
            parts = [
                to_micro_batch(collate(batch[first : first + batch_size], 0), model.config, torch.device("cpu"), sizes)
                for first in range(0, rows, batch_size)
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
    check(met("words", 14, 64, 64, d_kv), settled=11)


def test_batches_of_many_lengths_have_few_shapes() -> None:
    micro_batches = []
    for source, target in zip(*lengths("words", 100, 9), strict=True):
        rows = [Row(np.full(s, 3), np.full(t, 4), n) for n, (s, t) in enumerate(zip(source, target, strict=True))]
        batch = collate(rows, 0)
        micro_batches.append(to_micro_batch(batch, T5ModelConfig(), torch.device("cpu"), ((80, 96, 160), (80, 160))))
    assert {len(micro_batch.input_ids) for micro_batch in micro_batches} == {80, 96, 160}
    assert {len(micro_batch.decoder_ids) for micro_batch in micro_batches} == {80, 160}
    assert all(len(micro_batch.decoder_ids) == len(micro_batch.labels) for micro_batch in micro_batches)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "rows", "batch_size"), [("pairs", 16, 16), ("pairs", 16, 4), ("words", 256, 256)])
def test_a_thousand_steps_meet_few_shapes(kind: str, rows: int, batch_size: int) -> None:
    check(met(kind, 1000 if kind == "pairs" else 200, rows, batch_size), settled=100)
