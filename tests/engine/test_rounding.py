"""Stochastic rounding is right on average, the same for the same key, and lets small steps through."""

from __future__ import annotations

import pytest
import torch

from engine.rounding import round_stochastically, rounding_key, write_back

CPU = torch.device("cpu")


@pytest.mark.parametrize("value", [1.001, -1.001, 0.3, 1e-20, -123.456])
def test_rounds_to_a_neighbour_and_is_unbiased(value: float) -> None:
    values = torch.full((1 << 18,), value)
    rounded = round_stochastically(values.clone(), rounding_key(1, 2, 3, CPU), 0).float()
    neighbours = rounded.unique()
    assert len(neighbours) == 2
    gap = float(neighbours[1] - neighbours[0])
    assert abs(float(rounded.double().mean()) - float(values[0])) < 4 * gap / 2 / len(values) ** 0.5


def test_values_that_bf16_holds_are_kept() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(round_stochastically(values.float(), rounding_key(0, 1, 0, CPU), 0), values)


def test_key_decides_everything() -> None:
    values = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    draws = {
        numbers: round_stochastically(values.clone(), rounding_key(*numbers, CPU), 0)
        for numbers in [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]
    }
    again = round_stochastically(values.clone(), rounding_key(1, 1, 1, CPU), 0)
    assert torch.equal(draws[1, 1, 1], again)
    differing = [not torch.equal(draws[1, 1, 1], draw) for numbers, draw in draws.items() if numbers != (1, 1, 1)]
    assert all(differing)


@pytest.mark.parametrize("is_stochastic", [True, False])
def test_steps_below_the_last_bit_add_up_only_by_chance(is_stochastic: bool) -> None:
    weight = torch.ones(20_000, dtype=torch.bfloat16)
    for step in range(1, 101):
        key = rounding_key(0, step, 0, CPU) if is_stochastic else None
        write_back(weight, weight.float() + 1e-4, key, 0)
    moved = float(weight.double().mean()) - 1.0
    assert moved == pytest.approx(1e-2 if is_stochastic else 0.0, abs=5e-4)


def test_fp32_weights_are_not_rounded() -> None:
    weight, values = torch.zeros(100), torch.rand(100)
    write_back(weight, values.clone(), rounding_key(0, 1, 0, CPU), 0)
    assert torch.equal(weight, values)
