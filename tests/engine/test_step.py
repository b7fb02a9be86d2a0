"""A step tells what it came to: done, short of memory, or not finite; one that fails leaves no gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.batches.collate import Batch
from devices.cpu import CpuDevice
from engine.checkpointing import Checkpointing
from engine.finite import OnReady, StepChecks
from engine.micro_batches import MicroBatch
from engine.optimizers import OPTIMIZERS, Step
from engine.step import Engine, Outcome, accumulate
from engine.update import Update
from engine.walk import Walk
from engine.weights import WeightStore
from memory.estimate.workload import ExecutionPlan
from model.loss import LossSettings
from tests.engine.small_models import small_model

CHOICE = ExecutionPlan(2, 1, 1, 9, 2, "float32", "float32", 2**20)


def rows(seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    inputs, labels = draw.integers(2, 61, (2, 7)), draw.integers(2, 61, (2, 5))
    return Batch(inputs, np.array([7, 7]), labels, np.array([5, 5]), draw.integers(0, 99, 2))


def engine_of(max_grad_norm: float = 0.0, sum_over: Callable[..., list[float]] | None = None) -> Engine:
    model, checks = small_model(), StepChecks()
    update = Update(OPTIMIZERS["adafactor"](dict(model.named_parameters())), max_grad_norm)
    walk = Walk(model, Checkpointing(9), WeightStore(torch.float32), LossSettings(), 0.0, check_loss=checks.loss)
    others = {} if sum_over is None else {"sum_over": sum_over}
    return Engine(walk, update, CpuDevice(), CHOICE, checks, **others)


def run(engine: Engine, number: int = 1) -> Outcome:
    before = [weight.detach().clone() for weight in engine.model.parameters()]
    outcome = engine.step(Step(number, 1e-2), [rows(1), rows(2)], 20)
    assert all(weight.grad is None for weight in engine.model.parameters())
    changed = any(not torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    assert changed == outcome.is_changed
    return outcome


def failing(monkeypatch: pytest.MonkeyPatch, engine: Engine, after: int, error: Exception) -> None:
    """The walk fails before group `after` of weights is handed over."""
    plain, handed = engine.walk.gradients, []

    def gradients(micro_batches: list[MicroBatch], total_labels: int, on_ready: OnReady) -> torch.Tensor:
        def ready(weights: Any) -> None:
            if len(handed) == after:
                raise error
            handed.append(weights)
            on_ready(weights)

        return plain(micro_batches, total_labels, ready)

    monkeypatch.setattr(engine.walk, "gradients", gradients)


def test_a_step_that_is_done() -> None:
    engine = engine_of()
    first = run(engine)
    assert first.is_done and first.is_changed and first.failure is None
    assert 0.0 < run(engine, 2).loss < first.loss


@pytest.mark.parametrize(("after", "is_changed"), [(0, False), (3, True)])
def test_a_step_that_memory_does_not_suffice_for(monkeypatch: pytest.MonkeyPatch, after: int, is_changed: bool) -> None:
    engine = engine_of()
    failing(monkeypatch, engine, after, MemoryError())
    outcome = run(engine)
    assert outcome.is_out_of_memory and outcome.is_finite and not outcome.is_done
    assert outcome.is_changed == is_changed
    assert isinstance(outcome.failure, MemoryError) and outcome.failure.__traceback__ is None, "it would hold the step"


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    engine = engine_of()
    with torch.no_grad():
        engine.model.decoder.final_norm.weight[3] = float("inf")
    outcome = run(engine)
    assert not (outcome.is_finite or outcome.is_out_of_memory or outcome.is_changed or outcome.is_done)
    assert outcome.failure is None


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_told_with_what_it_has_changed(
    monkeypatch: pytest.MonkeyPatch, max_grad_norm: float
) -> None:
    engine = engine_of(max_grad_norm)
    plain = engine.walk.objective.loss_and_gradients

    def broken(*facts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, grad = plain(*facts)
        return loss, grad * float("nan")

    monkeypatch.setattr(engine.walk.objective, "loss_and_gradients", broken)
    outcome = engine.step(Step(1, 1e-2), [rows(1)], 10)
    assert not outcome.is_finite and not outcome.is_out_of_memory
    assert outcome.is_changed == (max_grad_norm == 0.0), "clipped ones are looked at before any is applied"


def test_what_happens_elsewhere_counts_here() -> None:
    elsewhere = [5.0, 1.0, 1.0, 0.0, 1.0]  # loss, short of memory, weights changed, not finite, the step before was not
    engine = engine_of(sum_over=lambda *numbers: [a + b for a, b in zip(numbers, elsewhere, strict=True)])
    outcome = engine.step(Step(1, 1e-2), [rows(1)], 20)
    assert outcome.is_out_of_memory and outcome.is_changed and outcome.failure is None and outcome.loss > 5.0
    assert outcome.is_late


@pytest.mark.parametrize(("together", "sizes"), [(5, [5]), (2, [2, 2, 1])])
def test_only_the_last_of_several_walks_hands_over(together: int, sizes: list[int]) -> None:
    passes, handed_over, made = [], [], []

    def gradients(members: list[int], total_labels: int, on_ready: OnReady) -> torch.Tensor:
        assert members == made.pop() and not made, "micro-batches are made when their pass comes"
        passes.append(members)
        on_ready([])
        return torch.tensor(float(sum(members)))

    walk: Any = SimpleNamespace(model=small_model(), gradients=gradients)
    parts: Any = [list(range(5))[first : first + together] for first in range(0, 5, together)]
    each: Any = (made.append(part) or part for part in parts)
    total = accumulate(walk, each, len(parts), 7, lambda weights: handed_over.append(len(passes)))
    assert [len(members) for members in passes] == sizes
    assert [row for members in passes for row in members] == list(range(5))
    assert float(total) == 10.0 and handed_over == [len(sizes)]
    assert float(accumulate(walk, [], 0, 7, handed_over.append)) == 0.0, "a rank without rows"
