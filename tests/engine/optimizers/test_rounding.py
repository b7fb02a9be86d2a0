"""Stochastic rounding is right on average, the same for the same key, and lets small steps through."""

from __future__ import annotations

import pytest
import torch

from engine.optimizers.rounding import ROUNDINGS, Compensated, round_stochastically, rounding_key


@pytest.mark.parametrize("value", [1.001, -1.001, 1e-20])
def test_rounds_to_a_neighbour_and_is_unbiased(value: float) -> None:
    values = torch.full((1, 1 << 18), value)
    rounded = round_stochastically(values.clone(), [rounding_key(1, 2, 3)], 0).float()
    neighbours = rounded.unique()
    assert len(neighbours) == 2
    gap = float(neighbours[1] - neighbours[0])
    assert abs(float(rounded.double().mean()) - float(values[0, 0])) < 4 * gap / 2 / values.numel() ** 0.5


@pytest.mark.parametrize(("name", "expected"), [("stochastic", 0.1), ("compensated", 0.1), ("nearest", 0.0)])
def test_steps_below_the_last_bit(name: str, expected: float) -> None:
    weight, remainder = torch.ones(1, 20_000, dtype=torch.bfloat16), torch.zeros(1, 20_000, dtype=torch.int8)
    rounding = ROUNDINGS[name]()
    for step in range(1, 101):
        values = rounding.read(weight, remainder) + 1e-3
        rounding.write(weight, values, remainder, [rounding_key(0, step, 0)], 0)
    values = rounding.read(weight, remainder)
    assert float(values.double().mean()) - 1.0 == pytest.approx(expected, abs=3e-3)


def test_compensated_weights_hold_sixteen_bits() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 10_000)
    weight, remainder = values.bfloat16() * 0, torch.zeros(10_000, dtype=torch.int8)
    rounding = Compensated()
    rounding.write(weight, values.clone(), remainder, [rounding_key(0, 1, 0)], 0)
    error = ((rounding.read(weight, remainder) - values) / values).abs()
    assert float(error.max()) < 2.0**-15
    assert float(((weight.float() - values) / values).abs().max()) > 2.0**-10, "bf16 alone is much coarser"
