"""Each optimizer against its formula in float64: weights one by one in row chunks, as on a CPU, and together, as on a
GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from devices.base import CUDA, HOST, MPS, DeviceTraits, override_traits
from engine.optimizers import OPTIMIZERS, Optimizer, Step
from engine.optimizers.rounding import round_stochastically, rounding_keys, write_rounded
from memory.estimate.workload import Workload, state_bytes
from model.lora.adapter import add_adapters
from model.lora.form import LoraSettings
from model.t5 import T5
from tests.engine.small_models import small_model

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (37, 23), "vector": (19,), "twin": (37, 23)}


def make(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).mul(0.3).to(dtype)) for name, shape in SHAPES.items()
    }


def run(optimizer: Optimizer, weights: dict[str, nn.Parameter], steps: int = 6) -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(1, steps + 1):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        for group in optimizer.groups(weights.values()):
            optimizer.update(group, Step(number, 0.02, 0.1))


def adafactor(weight: torch.Tensor, grads: list[torch.Tensor], rate: float, decay: float) -> torch.Tensor:
    """Algorithm 4 of the paper, all of it at once, with full matrices."""
    row = column = square = None
    for number, grad in enumerate(grads, 1):
        beta = 1 - number**-0.8
        squared = grad**2 + 1e-30
        if weight.dim() == 2:
            row = squared.mean(1) if row is None else beta * row + (1 - beta) * squared.mean(1)
            column = squared.mean(0) if column is None else beta * column + (1 - beta) * squared.mean(0)
            second = torch.outer(row, column) / row.mean()
        else:
            second = square = squared if square is None else beta * square + (1 - beta) * squared
        update = grad / second.sqrt()
        update /= max(1.0, float(update.square().mean().sqrt()))
        scale = max(1e-3, float(weight.square().mean().sqrt()))
        weight = weight * (1 - rate * decay) - rate * scale * update
    return weight


def adamw(weight: torch.Tensor, grads: list[torch.Tensor], rate: float, decay: float, scaled: bool) -> torch.Tensor:
    first = torch.zeros_like(weight)
    second = torch.zeros_like(weight)
    for number, grad in enumerate(grads, 1):
        scale = max(1e-3, float(weight.square().mean().sqrt())) if scaled else 1.0
        first = 0.9 * first + 0.1 * grad
        second = 0.999 * second + 0.001 * grad**2
        update = (first / (1 - 0.9**number)) / ((second / (1 - 0.999**number)).sqrt() + 1e-8)
        weight = weight * (1 - rate * decay) - rate * scale * update
    return weight


def muon(weight: torch.Tensor, grads: list[torch.Tensor], rate: float, decay: float) -> torch.Tensor:
    """The singular values themselves go through the polynomials; vectors as Adafactor."""
    if weight.dim() == 1:
        return adafactor(weight, grads, rate, decay)
    first = torch.zeros_like(weight)
    size = max(1e-3, float(weight.square().mean().sqrt()))
    for grad in grads:
        moved = 0.95 * first + 0.05 * grad
        first = moved.float().bfloat16().double()
        left_vectors, values, right = torch.linalg.svd(0.05 * grad + 0.95 * moved, full_matrices=False)
        values /= values.norm()
        values = 7.9277 * values - 21.6958 * values**3 + 15.2896 * values**5
        values = 3.7290 * values - 2.6779 * values**3 + 0.4983 * values**5
        values = 2.9400 * values - 2.2000 * values**3 + 0.4775 * values**5
        update = 0.4 * max(weight.shape) ** 0.5 * (left_vectors * values) @ right
        weight = weight * (1 - rate * decay) - rate * size * update
    return weight


ORACLES = {
    "adafactor": adafactor,
    "muon": muon,
    "adamw": lambda *args: adamw(*args, scaled=False),
    "adamw_rms": lambda *args: adamw(*args, scaled=True),
    "adamw_8bit": lambda *args: adamw(*args, scaled=True),
}


@pytest.mark.parametrize(
    "traits",
    [replace(HOST, update_elements=50), MPS, replace(CUDA, update_elements=50)],
    ids=["in chunks", "together on a Mac", "in chunks on a GPU"],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follows_its_formula(name: str, traits: DeviceTraits) -> None:
    weights = make()
    before = make()
    optimizer = OPTIMIZERS[name](weights)
    with override_traits("cpu", traits):
        run(optimizer, weights)
        assert not optimizer.incomplete()
    generator = torch.Generator().manual_seed(1)
    grads: dict[str, list[torch.Tensor]] = {key: [] for key in SHAPES}
    for _ in range(6):
        for key, shape in SHAPES.items():
            grads[key].append(torch.randn(shape, generator=generator).double())
    for key in SHAPES:
        decay = 0.1 if len(SHAPES[key]) == 2 else 0.0
        expected = ORACLES[name](before[key].detach().double(), grads[key], 0.02, decay)
        # moments of one byte: a step is off by a few percent, and six steps move a weight by about 0.03
        tolerance = {"adamw_8bit": 2e-3, "muon": 1e-5}.get(name, 1e-6) if len(SHAPES[key]) == 2 else 1e-6
        assert torch.allclose(weights[key].double(), expected, rtol=1e-5, atol=tolerance)
        assert not torch.allclose(weights[key], before[key], atol=1e-2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_what_the_plan_counts(name: str) -> None:
    model = T5(small_model().config, dtype=torch.bfloat16).initialise(0)
    optimizer = OPTIMIZERS[name](dict(model.named_parameters()))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
        optimizer.update([weight], Step(1, 0.01))
    total = sum(tensor.nbytes for tensor in optimizer.state.values())
    work = Workload(model.config, 1, 8, 8, False, name)
    tolerance = 0.25 if name == "adamw_8bit" else 0.03  # These rows are shorter than a block of scales.
    assert state_bytes(work) == pytest.approx(total, rel=tolerance)


@pytest.mark.parametrize("name", ["adamw_8bit", "muon"])
def test_loaded_state_goes_on_as_if_never_stopped(name: str) -> None:
    whole = make()
    halves = make()
    optimizer = OPTIMIZERS[name](whole)
    first = OPTIMIZERS[name](halves)
    run(optimizer, whole, 2)
    run(optimizer, whole, 2)
    run(first, halves, 2)
    second = OPTIMIZERS[name](halves)
    second.load_state({key: value.clone() for key, value in first.state.items()})
    run(second, halves, 2)
    assert all(torch.equal(whole[key], halves[key]) for key in whole)


@pytest.mark.parametrize("value", [-1.001, 1e-20])
def test_rounds_to_a_neighbour_and_is_unbiased(value: float) -> None:
    values = torch.full((1, 1 << 18), value)
    rounded = round_stochastically(values.clone(), rounding_keys(1, 2, torch.tensor([3])), 0).float()
    neighbours = rounded.unique()
    assert len(neighbours) == 2
    gap = float(neighbours[1] - neighbours[0])
    assert abs(float(rounded.double().mean()) - float(values[0, 0])) < 4 * gap / 2 / values.numel() ** 0.5


def test_decay_shrinks_matrices_alone() -> None:
    model = small_model()
    add_adapters(model, LoraSettings(2, 4.0, ("q",)), seed=3)
    for weight in model.parameters():
        weight.data.fill_(1.0)
    optimizer = OPTIMIZERS["adafactor"](dict(model.named_parameters()))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
        optimizer.update([weight], Step(1, 0.1, weight_decay=0.5))
    shrunk = {key for key, weight in model.named_parameters() if not torch.equal(weight, torch.ones_like(weight))}
    spared = ("norm.weight", "bias.table")
    assert shrunk == {key for key, _ in model.named_parameters() if not key.endswith(spared)}
    assert {key.split(".")[-1] for key, _ in model.named_parameters()} >= {"table", "a", "b"}


def test_steps_below_the_last_bit_are_kept_on_average() -> None:
    weight = torch.ones(1, 20_000, dtype=torch.bfloat16)
    for step in range(1, 101):
        write_rounded([weight], weight.float().unsqueeze(0) + 1e-3, rounding_keys(0, step, torch.tensor([0])), 0)
    assert float(weight.double().mean()) - 1.0 == pytest.approx(0.1, abs=3e-3)
