"""One order of stages: evaluation loads weights as a process without rows does; backward completes them in reverse, to
where nothing learns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from engine.blockwise import Blockwise, Schedule
from engine.weights import WeightStore
from model.loss import LossSettings
from tests.engine.small_models import Collected, Rectangle, small_model

CUTS = [[0, 1], [2, 3]]


class Recording(WeightStore):
    """Remembers what was asked for, and what was expected next."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.asked: list[list[int]] = []
        self.expected: list[list[int]] = []

    @contextmanager
    def in_compute_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        self.asked.append([id(weight) for weight in weights])
        yield

    def expect(self, weights: Iterable[nn.Parameter], upcoming: Any) -> None:
        self.expected.append([id(weight) for weight in upcoming[0]] if upcoming else [])


@pytest.mark.parametrize(
    ("family", "frozen"),
    [("t5", ""), ("t5", "embedding encoder.blocks.0 encoder.bias"), ("umt5", "embedding encoder decoder.blocks")],
)
def test_the_order_is_known_before_the_pass(family: str, frozen: str) -> None:
    model, batch, store, collected = small_model(family), Rectangle(), Recording(), Collected()
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(tuple(frozen.split()) or ("none",)))
    blockwise = Blockwise(model, 99, store, LossSettings(), 0.0)
    blockwise.loss(batch.micro_batches(model, CUTS))
    forward = list(store.asked)
    store.asked.clear()
    store.expected.clear()
    blockwise.gradients(batch.micro_batches(model, CUTS), batch.num_labels, collected)  # type: ignore[arg-type]
    assert store.asked[: len(forward)] == forward
    groups = [[id(weight) for weight in group] for group in Schedule(model).backward()]
    assert store.asked[len(forward) :] == groups[:-1]
    assert [[id(weight) for weight in group] for group in collected.groups] == groups
    blocks = [*forward[:-1], *store.asked[len(forward) :]]
    assert store.expected == [*blocks[1:], groups[-1]], "each block is expected while the one before it computes"
