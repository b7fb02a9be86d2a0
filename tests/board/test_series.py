"""A chart of any length has five hundred points, and loses no spike."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from board.series import POINTS, Grid


def drawn(grid: Grid, first: int = 0) -> dict[str, Any]:
    return dict(grid.drawn(first))


def test_a_short_run_is_drawn_as_it_is() -> None:
    grid = Grid()
    for step in range(1, 5):
        grid.add(step, float(step), {"loss": step / 2})
    found = drawn(grid)
    assert found["steps"] == [0, 1, 2, 3, 4]
    assert found["loss"]["mean"] == [None, 0.5, 1.0, 1.5, 2.0]


def test_a_long_run_has_few_points_and_keeps_its_spikes() -> None:
    grid = Grid()
    for step in range(100_000):
        grid.add(step, step * 0.5, {"loss": 99.0 if step == 61_803 else 1.0, "speed": 5.0})
    found = drawn(grid)
    assert POINTS / 2 <= len(found["steps"]) <= POINTS
    assert max(found["loss"]["high"]) == 99.0 and min(found["loss"]["low"]) == 1.0
    spike = found["loss"]["high"].index(99.0)
    assert found["steps"][spike] <= 61_803 < found["steps"][spike] + found["width"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_buckets_hold_what_was_put_into_them(values: list[float]) -> None:
    grid = Grid()
    for step, value in enumerate(values):
        grid.add(step, float(step), {"loss": value})
    series, width = grid.series["loss"], grid.width
    for place in range(grid.size):
        held = values[place * width : (place + 1) * width]
        assert series.lows[place] == min(held) and series.highs[place] == max(held)
        assert series.counts[place] == len(held)
        assert math.isclose(series.sums[place], sum(held), rel_tol=1e-9, abs_tol=1e-3)


def test_what_is_no_number_is_a_gap_and_is_told() -> None:
    grid = Grid()
    for step, loss in enumerate([1.0, None, 3.0]):
        grid.add(step, float(step), {"loss": loss})
    found = drawn(grid)
    assert found["loss"]["mean"] == [1.0, None, 3.0] and found["not_a_number"] == [1]


def test_one_that_is_no_number_among_others_is_told_still() -> None:
    grid = Grid()
    for step in range(5000):
        grid.add(step, float(step), {"loss": None if step == 1234 else 1.0})
    found = drawn(grid)
    (place,) = found["not_a_number"]
    assert place <= 1234 < place + found["width"]
    assert None not in found["loss"]["mean"]


def test_a_pause_parts_the_line_in_time() -> None:
    grid = Grid()
    for step in range(20):
        grid.add(step, step + (5000.0 if step >= 12 else 0.0), {"loss": 1.0})
    assert drawn(grid)["breaks"] == [12]


def test_a_pause_in_the_middle_of_a_bucket_parts_it_too() -> None:
    grid = Grid()
    for step in range(5000):
        grid.add(step, step + (5000.0 if step >= 1801 else 0.0), {"loss": 1.0})
    (place,) = drawn(grid)["breaks"]
    assert (place - 1) * grid.width < 1801 <= place * grid.width


def test_slow_steps_are_no_pause() -> None:
    grid = Grid()
    for step in range(20):
        grid.add(step, step * 300.0, {"loss": 1.0})
    assert drawn(grid)["breaks"] == []


def test_a_part_may_be_drawn_alone() -> None:
    grid = Grid()
    for step in range(50):
        grid.add(step, float(step), {"loss": float(step)})
    assert drawn(grid, 47)["loss"]["mean"] == [47.0, 48.0, 49.0]
    assert drawn(grid, 47)["first"] == 47
