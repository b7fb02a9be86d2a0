"""A chart of any length has five hundred points, and loses no spike."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from board.series import POINTS, Grid


def grid_of(losses: list[Any], seconds: Any = float) -> Grid:
    grid = Grid()
    for step, loss in enumerate(losses):
        grid.add(step, seconds(step), {"loss": loss})
    return grid


def drawn(grid: Grid, first: int = 0) -> dict[str, Any]:
    return dict(grid.drawn(first))


def test_a_short_run_is_drawn_as_it_is_with_gaps_for_what_is_no_number() -> None:
    found = drawn(grid_of([1.0, None, 3.0, 4.0]))
    assert found["steps"] == [0, 1, 2, 3] and found["series"]["loss"]["mean"] == [1.0, None, 3.0, 4.0]
    assert found["not_a_number"] == [1]
    part = drawn(grid_of([float(step) for step in range(50)]), 47)
    assert part["series"]["loss"]["mean"] == [47.0, 48.0, 49.0] and part["first"] == 47


def test_a_metric_that_comes_later_is_drawn_anew() -> None:
    grid = grid_of([1.0, 2.0])
    version = grid.version
    grid.add(2, 2.0, {"eval_mine": 7.0})
    assert drawn(grid)["series"]["eval_mine"]["mean"] == [None, None, 7.0] and grid.version > version


def test_a_long_run_has_few_points_and_keeps_its_spikes() -> None:
    losses: list[float | None] = [1.0] * 20_000
    losses[6_180], losses[1234] = 99.0, None
    found = drawn(grid_of(losses))
    assert POINTS / 2 <= len(found["steps"]) <= POINTS
    assert max(found["series"]["loss"]["high"]) == 99.0 and min(found["series"]["loss"]["low"]) == 1.0
    spike = found["steps"][found["series"]["loss"]["high"].index(99.0)]
    (lost,) = found["not_a_number"]
    assert spike <= 6_180 < spike + found["width"] and lost <= 1234 < lost + found["width"]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000))
def test_buckets_hold_what_was_put_into_them(values: list[float]) -> None:
    grid = grid_of(values)
    series, width = grid.series["loss"], grid.width
    for place in range(grid.size):
        held = values[place * width : (place + 1) * width]
        assert series.lows[place] == min(held) and series.highs[place] == max(held)
        assert series.counts[place] == len(held)
        assert math.isclose(series.sums[place], sum(held), rel_tol=1e-9, abs_tol=1e-3)


def test_a_pause_parts_the_line_in_time_and_slow_steps_do_not() -> None:
    assert drawn(grid_of([1.0] * 20, lambda step: step + 5000.0 * (step >= 12)))["breaks"] == [12]
    grid = grid_of([1.0] * 5000, lambda step: step + 5000.0 * (step >= 1801))
    (place,) = drawn(grid)["breaks"]  # behind the bucket in whose middle it lies
    assert (place - 1) * grid.width < 1801 <= place * grid.width
    assert drawn(grid_of([1.0] * 20, lambda step: step * 300.0))["breaks"] == []
