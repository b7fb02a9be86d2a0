"""The way of a GPU, on the CPU: the same gradients, weights and losses as the CPU's own way, summed in another
order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.batches.collate import Row, collate
from devices.base import CUDA, HOST, MPS, DeviceTraits, override_traits
from devices.cpu import CpuDevice
from engine.blockwise import Blockwise
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.step import Done, Engine, NotFinite
from engine.weights import WeightStore
from memory.estimate.workload import ExecutionPlan
from model.embedding_gradients import TokenSums, add_token_gradients
from model.loss import LossSettings
from model.micro_batch import MicroBatch
from model.t5 import T5
from tests.engine.small_models import Rectangle, relative_error, small_model

CUDA = replace(CUDA, is_fused=False)  # A CPU has none of its kernels.
GPUS = {"cuda": CUDA, "mps": MPS}


def gradients(
    blockwise: Blockwise, micro_batches: list[MicroBatch], labels: int
) -> tuple[float, dict[str, torch.Tensor]]:
    loss = float(blockwise.gradients(micro_batches, labels)) / labels
    found = {name: w.grad.detach() for name, w in blockwise.model.named_parameters() if w.grad is not None}
    for weight in blockwise.model.parameters():
        weight.grad = None
    return loss, found


@pytest.mark.parametrize(
    ("family", "gpu", "saved", "rate"), [("t5", "cuda", 0, 0.3), ("t5-v1.1", "mps", 99, 0.3), ("umt5", "cuda", 2, 0.0)]
)
def test_the_walk_gives_the_gradients_of_the_cpu(family: str, gpu: str, saved: int, rate: float) -> None:
    with override_traits("cpu", GPUS[gpu]):  # its q, k and v lie below each other
        model, batch = small_model(family), Rectangle()
    settings = LossSettings(61 * 4 * 16, 0.1)
    blockwise = Blockwise(model, saved, WeightStore(torch.float32), settings, rate)
    found = []
    scores = 2000  # what is dropped of attention's weights follows from how they are cut
    for way in (replace(HOST, scores=scores), replace(GPUS[gpu], scores=scores, largest_inner=40)):
        with override_traits("cpu", way):
            found.append(gradients(blockwise, batch.micro_batches(model, [[0, 3], [1], [2]]), batch.num_labels))
    (loss, expected), (ours, other) = found
    assert ours == pytest.approx(loss, rel=1e-6) and other.keys() == expected.keys()
    assert max(relative_error(other[name], expected[name]) for name in expected) < 2e-5


@pytest.mark.parametrize(
    ("gpu", "dtype", "name"),
    [
        ("cuda", torch.bfloat16, "adamw_8bit"),
        ("cuda", torch.bfloat16, "muon"),
        ("mps", torch.float32, "adafactor"),
    ],
)
def test_updates_are_those_of_the_cpu(gpu: str, dtype: torch.dtype, name: str) -> None:
    def run(way: DeviceTraits) -> list[torch.Tensor]:
        model, generator = T5(small_model().config, dtype=dtype).initialise(0), torch.Generator().manual_seed(0)
        optimizer = OPTIMIZERS[name](dict(model.named_parameters()))
        update = OptimizerInBackward(optimizer)
        groups = [list(model.encoder.parameters()), list(model.decoder.parameters()), [model.embedding]]
        with override_traits("cpu", way):
            for number in range(1, 4):
                update.begin(Step(number, 0.01, 0.1, seed=3))
                for group in groups:
                    for weight in group:
                        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
                    update.apply(group)
                update.finish(torch.zeros(()))
                assert all(weight.grad is None for weight in model.parameters())
        assert not optimizer.incomplete()
        return [weight.detach().clone() for weight in model.parameters()]

    small = replace(GPUS[gpu], update=3000)
    # where a sum differs in its last place, a rounding may go the other way
    most = 1e-5 if dtype == torch.float32 else 2e-3
    for ours, theirs in zip(run(small), run(HOST), strict=True):
        assert relative_error(ours, theirs) < most


def test_a_state_that_was_saved_goes_on_on_a_gpu(tmp_path: Path) -> None:
    from training.checkpoints.content import OPTIMIZER_FILE, STATE, load_optimizer, write_safetensors

    def steps(optimizer, weights, numbers):  # type: ignore[no-untyped-def]
        for number in numbers:
            for index, weight in enumerate(weights):
                generator = torch.Generator().manual_seed(100 * number + index)
                weight.grad = torch.randn(weight.shape, generator=generator)
            for group in optimizer.groups(weights):
                optimizer.update(group, Step(number, 0.01))

    with override_traits("cpu", CUDA):
        whole, parts = small_model(), small_model()
        steps(OPTIMIZERS["adafactor"](dict(whole.named_parameters())), list(whole.parameters()), range(1, 6))
        first = OPTIMIZERS["adafactor"](dict(parts.named_parameters()))
        steps(first, list(parts.parameters()), range(1, 4))
        (tmp_path / STATE).mkdir()
        write_safetensors(first.state, tmp_path / STATE / OPTIMIZER_FILE)
        second = OPTIMIZERS["adafactor"](dict(parts.named_parameters()))
        load_optimizer(tmp_path, second)
        steps(second, list(parts.parameters()), range(4, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


def engine_of(model: T5, max_grad_norm: float = 0.0) -> Engine:
    choice = ExecutionPlan(4, 1, 1, 99, 4, "float32", "float32", 1 << 20)
    blockwise = Blockwise(model, 99, WeightStore(torch.float32), LossSettings(), 0.0)
    update = OptimizerInBackward(OPTIMIZERS["adafactor"](dict(model.named_parameters())), max_grad_norm)
    return Engine(blockwise, update, CpuDevice(), choice)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3])
def test_steps_have_the_losses_of_the_cpu(max_grad_norm: float) -> None:
    draw = np.random.default_rng(0)
    rows = [Row(draw.integers(2, 61, 9 + index), draw.integers(2, 61, 5), index) for index in range(4)]
    batch = collate(rows, 0)
    losses = []
    for way in (HOST, CUDA):
        with override_traits("cpu", way):
            engine = engine_of(small_model(), max_grad_norm)
            losses.append([engine.step(Step(number, 0.01), [batch], batch.num_labels).loss for number in range(1, 4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0][2] < losses[0][0]


@pytest.mark.parametrize("spoiled", ["loss", "gradient"])
def test_clipped_gradients_are_looked_at_before_any_is_applied(spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    batch = collate([Row(draw.integers(2, 61, 9), draw.integers(2, 61, 5), 0)], 0)
    with override_traits("cpu", CUDA):
        engine = engine_of(small_model(), 1.0)
        before, plain = (
            [w.detach().clone() for w in engine.model.parameters()],
            engine.blockwise.objective.loss_and_gradients,
        )

        def broken(*facts: Any) -> tuple[torch.Tensor, torch.Tensor]:
            loss, grad = plain(*facts)
            return (loss * float("nan"), grad) if spoiled == "loss" else (loss, grad * float("nan"))

        monkeypatch.setattr(engine.blockwise.objective, "loss_and_gradients", broken)
        outcome = engine.step(Step(1, 0.01), [batch], batch.num_labels)
        assert outcome == NotFinite(has_changed_weights=False)
        assert all(w.grad is None and torch.equal(w, b) for w, b in zip(engine.model.parameters(), before, strict=True))
        monkeypatch.setattr(engine.blockwise.objective, "loss_and_gradients", plain)
        assert isinstance(engine.step(Step(1, 0.01), [batch], batch.num_labels), Done)


@pytest.mark.parametrize(("dtype", "summed"), [(torch.bfloat16, 9000), (torch.float32, 1)])
def test_each_row_of_the_embedding_is_rounded_once(dtype: torch.dtype, summed: int) -> None:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 50, (count,), generator=generator) for count in (3000, 10, 1)]
    ids[0][torch.rand(3000, generator=generator) < 0.5] = 7
    grads = [torch.randn(len(part), 24, generator=generator).add_(1.0).bfloat16() for part in ids]
    table, exact = torch.full((50, 24), 0.25, dtype=dtype), torch.full((50, 24), 0.25, dtype=torch.float64)
    one_by_one = torch.full((50, 24), 0.25, dtype=torch.bfloat16)
    for part, grad in zip(ids, grads, strict=True):
        exact.index_add_(0, part, grad.double())
        for token, row in zip(part.tolist(), grad, strict=True):
            one_by_one[token] += row
    with override_traits("cpu", replace(CUDA, summed=summed)):
        add_token_gradients(table, ids, grads, TokenSums.of(ids, torch.device("cpu")))
    last_bit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    assert ((table.double() - exact).abs() <= last_bit * exact.abs() + 1e-5).all()
    off = (one_by_one[7].double() - exact[7]).abs() / exact[7].abs()
    assert off.mean() > 0.05, "added one by one in bf16 a frequent token is off by far more"
