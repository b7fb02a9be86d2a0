"""A step is done, out of memory or not finite; one that is not done leaves no gradients and says whether it can be run
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batches.collate import Batch
from devices.cpu import CpuDevice
from engine.blockwise import Objective
from engine.loss_scaling import LossScaling
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.step import Done, Engine, NotFinite, OutOfMemory
from engine.weights import weight_store_for
from memory.estimate.workload import ExecutionPlan
from tests.engine.small_models import Spoiled, blockwise_of, small_model

PLAN = ExecutionPlan(2, 1, 1, 9, 2, "float32", "float32", 2**20)
NAN = float("nan")


def rows(seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    inputs = draw.integers(2, 61, (2, 7))
    labels = draw.integers(2, 61, (2, 5))
    return Batch(inputs, np.array([7, 7]), labels, np.array([5, 5]), draw.integers(0, 99, 2))


def engine_of(
    max_grad_norm: float = 0.0,
    scaling: LossScaling | None = None,
    objective: Objective | None = None,
    plan: ExecutionPlan = PLAN,
    sum_over: Callable[..., list[float]] = lambda *numbers: list(numbers),
) -> Engine:
    model = small_model()
    store = weight_store_for(torch.float32, torch.float32 if scaling is None else torch.float16)
    optimizer = OPTIMIZERS["adafactor"](dict(model.named_parameters()))
    update = OptimizerInBackward(optimizer, max_grad_norm, scaling, store)
    blockwise = blockwise_of(model, 9, store, objective=objective, scaling=scaling)
    return Engine(blockwise, update, CpuDevice(), plan, sum_over)


def weights_of(engine: Engine) -> list[Tensor]:
    return [weight.detach().clone() for weight in engine.model.parameters()]


def run(
    engine: Engine, number: int = 1, batches: Sequence[Batch] = (rows(1), rows(2))
) -> tuple[Done | OutOfMemory | NotFinite, bool]:
    """What a step comes to, and whether it has changed weights."""
    before = weights_of(engine)
    outcome = engine.step(Step(number, 1e-2), batches, 10 * len(batches))
    assert all(weight.grad is None for weight in engine.model.parameters())
    return outcome, any(not torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


def losses_of(engine: Engine, numbers: Sequence[int], batches: Sequence[Batch] = (rows(1), rows(2))) -> list[float]:
    outcomes = [run(engine, number, batches)[0] for number in numbers]
    return [outcome.loss for outcome in outcomes if isinstance(outcome, Done)]


def fail(module: torch.nn.Module, gradients: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("changes_weights", [False, True])
def test_a_step_that_memory_does_not_suffice_for(changes_weights: bool) -> None:
    engine = engine_of()
    model = engine.model
    full = model.encoder.blocks[0] if changes_weights else model.decoder.final_norm
    full.register_full_backward_pre_hook(fail)
    outcome, has_changed = run(engine)
    assert isinstance(outcome, OutOfMemory) and outcome.has_changed_weights == has_changed == changes_weights
    assert isinstance(outcome.error, MemoryError) and outcome.error.__traceback__ is None, "it would hold the step"


@pytest.mark.parametrize("spoiled", [Spoiled(loss=NAN), Spoiled(gradient=NAN)])
@pytest.mark.parametrize(
    ("max_grad_norm", "plan", "is_held"),
    [(0.0, PLAN, False), (1.0, PLAN, True), (0.0, replace(PLAN, hold_gradients=True), True)],
)
def test_numbers_that_are_not_finite_change_weights_where_gradients_are_not_held(
    spoiled: Spoiled, max_grad_norm: float, plan: ExecutionPlan, is_held: bool
) -> None:
    outcome, has_changed = run(engine_of(max_grad_norm, objective=spoiled, plan=plan))
    assert outcome == NotFinite(has_changed_weights=not is_held) and has_changed == (not is_held)


def test_what_happens_on_other_processes_counts_here() -> None:
    def sums(loss: float, failures: float, changes: float) -> Engine:
        return engine_of(sum_over=lambda *here: [a + b for a, b in zip(here, (loss, failures, changes), strict=True)])

    (alone,) = losses_of(engine_of(), (1,))
    assert losses_of(sums(5.0, 0, 1), (1,)) == [alone + 5.0]
    assert run(sums(5.0, 1, 1))[0] == OutOfMemory(has_changed_weights=True, error=None)
    assert run(sums(NAN, 0, 1))[0] == NotFinite(has_changed_weights=True)


def test_an_overflow_costs_its_step_alone() -> None:
    scaling = LossScaling(2.0**40)
    engine = engine_of(scaling=scaling)
    outcome, has_changed = run(engine)
    assert isinstance(outcome, Done) and not np.isfinite(outcome.norm)
    assert not has_changed and not any(state.any() for state in engine.update.optimizer.state.values())
    assert scaling == LossScaling(2.0**39, 0, 1)
    scaling.scale = 2.0**10
    losses = losses_of(engine, (2, 3))
    assert scaling == LossScaling(2.0**10, 2, 1)
    untouched = engine_of(scaling=LossScaling(2.0**10))
    assert losses == losses_of(untouched, (1, 2)), "the step that was left out leaves no trace"
    assert all(torch.equal(a, b) for a, b in zip(weights_of(engine), weights_of(untouched), strict=True))


@pytest.mark.parametrize(("together", "is_held"), [(1, False), (2, True)])
def test_several_passes_make_the_step_of_one(together: int, is_held: bool) -> None:
    batches = [rows(seed) for seed in range(5)]
    passes = -(-5 // together)
    plan = replace(PLAN, accumulation_passes=passes, micro_batches_per_pass=together, hold_gradients=is_held)
    cut = engine_of(plan=plan)
    whole = engine_of()
    assert losses_of(cut, (1,), batches) == pytest.approx(losses_of(whole, (1,), batches))
    torch.testing.assert_close(weights_of(cut), weights_of(whole), rtol=1e-4, atol=1e-6)
