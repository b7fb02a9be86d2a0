"""Growth from step to step is noticed within some windows of steps; temporary memory and noise are not."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from memory.observe.growth import FORESIGHT, WINDOW, Growth
from units import KIB, MIB

BUDGET, LEVEL, STEP_BYTES = 400 * MIB, 298 * MIB, 60 * MIB  # of a run of short rows, as it was seen
NOISE = 6 * MIB


def seen(shares: Iterable[float], beyond: float = 0.1, first_peak: float = 0.0) -> list[int]:
    """The steps after which growth was found; a step's own peak is `beyond` what is held after it."""
    growth, peak, found = Growth(), first_peak, []
    for step, share in enumerate(shares, 1):
        peak = max(peak, share + beyond)
        if growth.after_step(share, peak) > 0:
            found.append(step)
    return found


def held(draw: random.Random, steps: int, pace: float = 0.0, keeps: float = 0.0) -> Iterator[float]:
    """Shares of the budget: a level, noise of which the share `keeps` stays until the next step, and growth."""
    noise = 0.0
    for step in range(steps):
        noise = keeps * noise + (1 - keeps) * draw.uniform(-NOISE, NOISE)
        yield (LEVEL + noise + pace * step) / BUDGET


def test_steady_growth_is_found_after_three_windows() -> None:
    assert seen([0.3 + 0.002 * step for step in range(40)]) == [3 * WINDOW, 4 * WINDOW, 5 * WINDOW]


@pytest.mark.parametrize("seed", range(2))
def test_what_comes_and_goes_is_no_growth(seed: int) -> None:
    draw = random.Random(seed)
    assert seen([0.5 + draw.choice((0.0, 0.0, 0.2, 0.3)) for _ in range(400)]) == []


@pytest.mark.parametrize("seed", range(2))
def test_noise_around_a_level_is_no_growth_over_thousands_of_steps(seed: int) -> None:
    """Peaks that noise itself raises, and one that was there before."""
    for first_peak in (0.0, 364.1 * MIB / BUDGET):
        assert seen(held(random.Random(seed), 3000), STEP_BYTES / BUDGET, first_peak) == []


@pytest.mark.parametrize("seed", range(2))
def test_slow_growth_within_noise_is_told_before_the_budget(seed: int) -> None:
    pace = 250 * KIB
    steps = (BUDGET - LEVEL - NOISE - STEP_BYTES) // pace  # until the budget is met
    found = seen(held(random.Random(seed), steps, pace), STEP_BYTES / BUDGET)
    assert found and found[0] <= 12 * WINDOW


def test_it_is_told_in_time_and_not_long_before() -> None:
    growth = Growth()
    shares = [0.2 + 0.001 * step for step in range(100)]
    pace = next(found for share in shares if (found := growth.after_step(share, share)))
    assert pace == pytest.approx(0.001)
    assert growth.steps_left(pace, 0.9) == 99 or growth.steps_left(pace, 0.9) == 100
    assert growth.steps_left(pace, 1.0 - FORESIGHT * pace * 1.1) is None and growth.steps_left(0.0, 0.99) is None
    growth.forget()
    assert growth.after_step(0.9, 0.9) == 0.0
