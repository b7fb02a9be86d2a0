"""One order of stages: evaluation brings weights as a process that accompanies it does; backward hands over in reverse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from engine.checkpointing import Checkpointing
from engine.schedule import Schedule
from engine.walk import Walk
from engine.weights import WeightStore
from model.loss import LossSettings
from model.t5 import T5
from tests.engine.small_models import Rectangle, small_model

CUTS = [[0, 1], [2, 3]]
Brought = list[tuple[str, list[int]]]


class Told(WeightStore):
    """Remembers what was asked for, how, and in which order."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.brought: Brought = []

    @contextmanager
    def in_compute_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        self.brought.append(("compute", [id(weight) for weight in weights]))
        yield

    @contextmanager
    def in_rest_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        self.brought.append(("rest", [id(weight) for weight in weights]))
        yield


def walk_of(model: T5) -> tuple[Walk, Brought]:
    store = Told()
    return Walk(model, Checkpointing(99), store, LossSettings(), 0.0), store.brought


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_who_has_no_rows_brings_what_evaluation_brings(family: str) -> None:
    model, batch = small_model(family), Rectangle()
    walk, brought = walk_of(model)
    walk.loss(batch.micro_batches(model, CUTS))
    evaluated = list(brought)
    brought.clear()
    walk.accompany()
    assert brought == evaluated
    own = [[id(weight) for weight in block.parameters()] for block in [*model.encoder.blocks, *model.decoder.blocks]]
    assert [weights for how, weights in brought if how == "compute" and len(weights) > 1] == own


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_a_step_goes_forward_as_evaluation_does_and_back_in_reverse(family: str) -> None:
    model, batch = small_model(family), Rectangle()
    walk, brought = walk_of(model)
    walk.accompany()
    forward = list(brought)
    brought.clear()
    walk.gradients(batch.micro_batches(model, CUTS), batch.num_labels, lambda weights: None)
    assert brought[: len(forward)] == forward
    back = [weights for how, weights in reversed(forward[:-1]) if how == "compute"]
    assert [weights for _, weights in brought[len(forward) :]] == back
    shared = [id(weight) for weight in Schedule(model).shared]
    assert [[id(w) for w in group] for group in Schedule(model).hand_over_order()] == [*back, shared]
