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


@pytest.mark.parametrize("d_kv", [16, 4], ids=["as compiled kernels take them", "dense"])
def test_words_meet_few_shapes(d_kv: int) -> None:
    draw, steps, rows = np.random.default_rng(1), 14, 64
    sources, targets = (draw.integers(4, 15, (steps, rows)) for _ in range(2))
    sizes: Sizes = Shapes(sources, targets).sizes(rows)
    model = small_model(d_model=32, d_kv=d_kv, d_ff=48, num_heads=8, num_layers=1, num_decoder_layers=1)
    blockwise = blockwise_of(model, 9)
    with Counting() as counting:
        for counting.step in range(steps):
            pairs = zip(sources[counting.step], targets[counting.step], strict=True)
            batch = [Row(np.full(s, 3), np.full(t, 4), number) for number, (s, t) in enumerate(pairs)]
            part = to_micro_batch(collate(batch, 0), model.config, torch.device("cpu"), sizes)
            blockwise.gradients([part], 100)
            model.zero_grad(set_to_none=True)
    for name, first in counting.first.items():
        assert len(first) <= MOST, f"{name} met {len(first)} shapes"
        late = sum(step > 11 for step in first.values())
        assert late <= 2, f"{name} met {late} shapes in the last steps"  # a row longer than any before
