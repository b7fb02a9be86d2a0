"""Stochastic rounding is right on average, the same for the same key, and lets small steps through."""

from __future__ import annotations

import pytest
import torch

from engine.optimizers.rounding import round_stochastically, rounding_keys, write_rounded


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
