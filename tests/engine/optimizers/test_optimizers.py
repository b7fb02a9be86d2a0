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
from engine.optimizers.adamw import STATE_BLOCK, decode_first, decode_second, encode_first, encode_second
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
    [replace(HOST, update=50), CUDA, MPS, replace(CUDA, update=50)],
    ids=["in chunks", "together", "together on a Mac", "in chunks on a GPU"],
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


@pytest.mark.parametrize(("family", "name"), [*(("t5", name) for name in OPTIMIZERS), ("umt5", "adafactor")])
def test_state_is_what_the_plan_counts(family: str, name: str) -> None:
    model = T5(small_model(family).config, dtype=torch.bfloat16).initialise(0)
    optimizer = OPTIMIZERS[name](dict(model.named_parameters()))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
        optimizer.update([weight], Step(1, 0.01))
    total = sum(tensor.nbytes for tensor in optimizer.state.values())
    work = Workload(model.config, 1, 8, 8, False, name)
    tolerance = 0.25 if name == "adamw_8bit" else 0.03  # These rows are shorter than a block of scales.
    assert state_bytes(work) == pytest.approx(total, rel=tolerance)


def test_moments_of_one_byte() -> None:
    width = 200
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(5, width, generator=generator) * torch.logspace(-6, 2, 5)[:, None]
    second = first.square() * torch.rand(5, width, generator=generator)
    second[:, ::7] = 0
    blocks = -(-width // STATE_BLOCK)
    codes = torch.zeros(5, width, dtype=torch.int8)
    scales = torch.zeros(5, blocks)
    encode_first(first, codes, scales)
    largest = decode_first(codes, scales).abs().amax(1)
    assert torch.allclose(largest, first.abs().amax(1), rtol=1e-5)
    assert float((decode_first(codes, scales) - first).abs().div(largest[:, None]).max()) < 1 / 127
    codes = torch.zeros(5, width, dtype=torch.uint8)
    encode_second(second, codes, scales)
    decoded = decode_second(codes, scales)
    large = second > second.amax(1, keepdim=True) * 2.0**-23
    assert float((decoded / second)[large].log2().abs().max()) < 0.06
    assert torch.equal(decoded == 0, second == 0), "a small moment must not become none"


@pytest.mark.parametrize("name", ["adafactor", "adamw"])
def test_bf16_weights_follow_fp32_ones(name: str) -> None:
    full = make()
    small = make(torch.bfloat16)
    for weights in (full, small):
        optimizer = OPTIMIZERS[name](weights)
        for number in range(1, 121):
            for weight in weights.values():
                weight.grad = (weight.detach().float() - 0.25).to(weight.dtype)  # towards 0.25
                optimizer.update([weight], Step(number, 0.02, seed=3))
    for key in SHAPES:
        narrow, wide = (float((weights[key].detach().float() - 0.25).abs().mean()) for weights in (small, full))
        assert narrow < wide + 2e-3 and wide < 0.2


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
    with pytest.raises(KeyError):
        second.load_state({"nobody/rows": torch.zeros(1)})


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (40, 12)), (torch.bfloat16, (12, 40))])
def test_muon_moves_all_directions_alike(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    left_vectors, _, right = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    weight = nn.Parameter(torch.full(shape, 0.5, dtype=dtype))
    weight.grad = ((left_vectors * torch.logspace(0, -1.7, min(shape))) @ right).to(dtype)
    OPTIMIZERS["muon"]({"blocks.0.wi": weight}).update([weight], Step(1, 1.0))
    moved = torch.linalg.svdvals(0.5 - weight.detach().float()) / (0.5 * 0.4 * max(shape) ** 0.5)
    assert float(moved.max()) < 1.45 and float(moved.min()) > 0.55


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


def test_weights_are_rounded_alike_and_hold_one_state_however_they_are_grouped() -> None:
    """A plan that shrinks updates fewer weights at a time; those of blocks are updated alone or with all others."""

    def train(sizes: list[int]) -> tuple[dict[str, nn.Parameter], Optimizer, int]:
        generator = torch.Generator().manual_seed(1)
        weights = {f"block.{number}.wi": nn.Parameter(torch.ones(8, 16, dtype=torch.bfloat16)) for number in range(4)}
        optimizer = OPTIMIZERS["adamw"](weights)
        most = 0
        for number, size in enumerate(sizes, 1):
            for weight in weights.values():
                weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
            with override_traits("cpu", replace(CUDA, update=size)):
                groups = optimizer.groups(weights.values())
                most = max(most, len(groups))
                for group in reversed(groups):
                    optimizer.update(group, Step(number, 0.02, seed=3))
        return weights, optimizer, most

    together, optimizer, num_groups = train([10_000, 10_000, 10_000])
    apart, changed, most = train([10_000, 256, 64])
    assert (num_groups, most) == (1, 4)
    assert all(torch.equal(together[name], apart[name]) for name in together)
    storages = [state.untyped_storage() for state in changed.state.values()]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(sizes.values()) == sum(state.nbytes for state in optimizer.state.values())


def test_weights_without_a_gradient_keep_what_they_are() -> None:
    weights = make()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = OPTIMIZERS["adafactor"](weights)
    weights["twin"].grad = torch.ones(SHAPES["twin"])
    with override_traits("cpu", CUDA):
        for group in optimizer.groups(weights.values()):
            optimizer.update(group, Step(1, 0.02))
    assert [name for name in weights if not torch.equal(weights[name], before[name])] == ["twin"]
    assert optimizer.incomplete() == ["matrix", "vector"]


# --- rounding


@pytest.mark.parametrize("value", [1.001, -1.001, 1e-20])
def test_rounds_to_a_neighbour_and_is_unbiased(value: float) -> None:
    values = torch.full((1, 1 << 18), value)
    rounded = round_stochastically(values.clone(), rounding_keys(1, 2, torch.tensor([3])), 0).float()
    neighbours = rounded.unique()
    assert len(neighbours) == 2
    gap = float(neighbours[1] - neighbours[0])
    assert abs(float(rounded.double().mean()) - float(values[0, 0])) < 4 * gap / 2 / values.numel() ** 0.5


def test_steps_below_the_last_bit_are_kept_on_average() -> None:
    weight = torch.ones(1, 20_000, dtype=torch.bfloat16)
    for step in range(1, 101):
        write_rounded([weight], weight.float().unsqueeze(0) + 1e-3, rounding_keys(0, step, torch.tensor([0])), 0)
    assert float(weight.double().mean()) - 1.0 == pytest.approx(0.1, abs=3e-3)
