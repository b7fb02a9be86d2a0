"""Growth from step to step is noticed within some windows of steps; temporary memory is not."""

from __future__ import annotations

import random

import pytest

from memory.observe.growth import FORESIGHT, WINDOW, Growth


def seen(shares: list[float]) -> list[int]:
    """The steps after which growth was found."""
    growth = Growth()
    return [step for step, share in enumerate(shares, 1) if growth.after_step(share) > 0]


def test_steady_growth_is_found_after_three_windows() -> None:
    assert seen([0.3 + 0.002 * step for step in range(40)]) == [3 * WINDOW, 4 * WINDOW, 5 * WINDOW]


@pytest.mark.parametrize("seed", range(5))
def test_what_comes_and_goes_is_no_growth(seed: int) -> None:
    draw = random.Random(seed)
    assert seen([0.5 + draw.choice((0.0, 0.0, 0.2, 0.3)) for _ in range(400)]) == []


def test_one_step_up_is_no_growth() -> None:
    assert seen([0.3] * 20 + [0.5] * 60) == []


def test_it_is_told_in_time_and_not_long_before() -> None:
    growth = Growth()
    pace = next(found for step in range(100) if (found := growth.after_step(0.2 + 0.001 * step)))
    assert pace == pytest.approx(0.001)
    assert growth.steps_left(pace, 0.9) == 99 or growth.steps_left(pace, 0.9) == 100
    assert growth.steps_left(pace, 1.0 - FORESIGHT * pace * 1.1) is None and growth.steps_left(0.0, 0.99) is None
    growth.forget()
    assert growth.after_step(0.9) == 0.0
