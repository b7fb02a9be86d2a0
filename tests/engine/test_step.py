"""A step tells what it came to: done, short of memory, or not finite; one that fails leaves no gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from data.batches.collate import Batch
from devices.cpu import CpuDevice
from engine.blockwise import Blockwise
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.step import Engine, Outcome
from engine.weights import WeightStore
from memory.estimate.workload import ExecutionPlan
from model.loss import LossSettings
from model.micro_batch import MicroBatch
from tests.engine.small_models import small_model

CHOICE = ExecutionPlan(2, 1, 1, 9, 2, "float32", "float32", 2**20)


def rows(seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    inputs, labels = draw.integers(2, 61, (2, 7)), draw.integers(2, 61, (2, 5))
    return Batch(inputs, np.array([7, 7]), labels, np.array([5, 5]), draw.integers(0, 99, 2))


def engine_of(max_grad_norm: float = 0.0, sum_over: Callable[..., list[float]] | None = None) -> Engine:
    model = small_model()
    update = OptimizerInBackward(OPTIMIZERS["adafactor"](dict(model.named_parameters())), max_grad_norm)
    blockwise = Blockwise(model, 9, WeightStore(torch.float32), LossSettings(), 0.0)
    return Engine(blockwise, update, CpuDevice(), CHOICE, sum_over)


def run(engine: Engine, number: int = 1) -> Outcome:
    before = [weight.detach().clone() for weight in engine.model.parameters()]
    outcome = engine.step(Step(number, 1e-2), [rows(1), rows(2)], 20)
    assert all(weight.grad is None for weight in engine.model.parameters())
    changed = any(not torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    assert changed == outcome.is_changed
    return outcome


def failing(monkeypatch: pytest.MonkeyPatch, engine: Engine, after: int, error: Exception) -> None:
    """The pass fails before group `after` of weights is handed over."""
    plain, handed = engine.update.apply, []

    def apply(weights: Any) -> None:
        if len(handed) == after:
            raise error
        handed.append(weights)
        plain(weights)

    monkeypatch.setattr(engine.update, "apply", apply)


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
    plain = engine.blockwise.objective.loss_and_gradients

    def broken(*facts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, grad = plain(*facts)
        return loss, grad * float("nan")

    monkeypatch.setattr(engine.blockwise.objective, "loss_and_gradients", broken)
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
def test_only_the_last_of_several_passes_updates(
    together: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, passes, plain = engine_of(), [], Blockwise.gradients

    def gradients(self: Blockwise, members: list[MicroBatch], labels: int, update: Any, is_last: bool) -> torch.Tensor:
        total = plain(self, members, labels, update, is_last)
        passes.append((len(members), update.has_changed_weights))
        return total

    monkeypatch.setattr(Blockwise, "gradients", gradients)
    engine.apply_plan(replace(CHOICE, accumulation_passes=len(sizes), micro_batches_per_pass=together))
    whole = engine_of()
    assert engine.step(Step(1, 1e-2), [rows(n) for n in range(5)], 50).loss == pytest.approx(
        whole.step(Step(1, 1e-2), [rows(n) for n in range(5)], 50).loss
    )
    assert passes[: len(sizes)] == [(size, number == len(sizes)) for number, size in enumerate(sizes, 1)]
    for ours, other in zip(engine.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-6)
    assert engine.step(Step(2, 1e-2), [], 7).loss == 0.0, "a rank without rows"
