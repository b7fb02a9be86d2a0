"""What a run has told, as its page draws it: a chart of any length has five hundred points, and loses no spike."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from board.reader import POINTS, Grid, History
from tests.board.recorded import BEGAN, folders, start, step, write


def drawn(history: History) -> dict[str, Any]:
    history.refresh()
    return dict(history.grid.drawn())


def test_what_was_added_is_drawn(tmp_path: Path) -> None:
    assert not History(tmp_path / "metrics.jsonl").refresh()
    path = write(folders(tmp_path), "one", start(), step(1))
    history = History(path)
    assert history.refresh() and not history.refresh()
    with path.open("a") as file:
        file.write(json.dumps(step(2, None)) + "\n" + json.dumps(step(3, 1.5)) + "\n")
    found = drawn(history)
    assert found["series"]["loss"]["mean"] == [None, 2.0, None, 1.5] and found["not_a_number"] == [2]
    assert history.generation == 1


def test_a_run_that_went_back_is_read_anew(tmp_path: Path) -> None:
    path = write(folders(tmp_path), "one", *(step(n) for n in range(1, 9)))
    history = History(path)
    assert len(drawn(history)["steps"]) == 9
    shorter = path.with_suffix(".tmp")
    shorter.write_text("".join(json.dumps(step(n, 1.0)) + "\n" for n in range(1, 4)))
    os.replace(shorter, path)
    assert drawn(history)["series"]["loss"]["mean"] == [None, 1.0, 1.0, 1.0] and history.generation == 2


def test_events_that_no_run_writes_are_passed_over(tmp_path: Path) -> None:
    odd = [
        {"event": "step"},
        {"event": "step", "step": -4, "loss": 1},
        {"event": "step", "step": 2**60, "loss": 1},
        {"event": "memory"},
        {"event": "_begin"},
        {"event": "cleanup", "kind": "full"},
        {"event": "start", "settings": 7},
    ]
    history = History(write(folders(tmp_path), "one", step(1), *odd, step(2)))
    assert drawn(history)["series"]["loss"]["mean"] == [None, 2.0, 2.0]
    assert dict(history.window(0, 9))["steps"] == [0, 1, 2]


def test_time_never_turns_round(tmp_path: Path) -> None:
    untimed = [{key: value for key, value in step(n).items() if key != "time"} for n in (1, 2)]
    history = History(write(folders(tmp_path), "one", *untimed, step(3), step(4, time=BEGAN - 500), step(5)))
    seconds = drawn(history)["seconds"][1:]
    assert seconds == sorted(seconds) and seconds[:2] == [1.0, 2.0]


def test_all_that_is_not_drawn(tmp_path: Path) -> None:
    path = write(
        folders(tmp_path),
        "one",
        start(),
        {"event": "plan", "peak_bytes": 9, "components": {"weights": 9}},
        step(1),
        {"event": "eval", "step": 1, "loss": 2.5},
        {"event": "eval", "step": 1, "loss": 3.0},
        {"event": "memory", "step": 1, "phase": "load", "anon_bytes": 700, "device_bytes": 0},
        {"event": "cleanup", "step": 1, "kind": "light", "freed_bytes": 1},
        {"event": "cleanup", "step": 1, "kind": "full", "freed_bytes": 5},
        {"event": "checkpoint", "step": 1, "path": "x", "best": True},
        {"event": "recovery", "step": 1, "report": "smaller"},
        {"event": "sample", "prompt": "p", "answer": "<script>", "reference": "r"},
        {"event": "end", "seconds": 4.0},
    )
    history = History(path)
    history.refresh()
    assert history.settings()["max_steps"] == 100 and history.latest["plan"]["peak_bytes"] == 9
    assert history.phase_peaks == {"train": 1001, "load": 700}
    assert list(history.cleanups) == [[1, 5]] and list(history.saves) == [1]
    assert history.notes[0]["text"] == "smaller" and history.samples[0]["answer"] == "<script>"
    assert history.latest["end"]["seconds"] == 4.0


def test_a_window_shows_each_step_at_its_time_with_evaluations_and_peaks(tmp_path: Path) -> None:
    found = [step(n, float(n)) for n in range(1, 5000)]
    found[3000:3000] = [
        {"event": "eval", "step": 3000, "loss": 3.5},
        {"event": "memory", "step": 3000, "phase": "evaluation", "anon_bytes": 9000},
    ]
    history = History(write(folders(tmp_path), "one", *found))
    while history.refresh(20_000):  # a long file in pieces
        pass
    shown: dict[str, Any] = dict(history.window(2999, 3002))
    assert shown["steps"] == [2999, 3000, 3001, 3002] and shown["series"]["loss"]["mean"] == [
        2999.0,
        3000.0,
        3001.0,
        3002.0,
    ]
    assert shown["seconds"] == sorted(set(shown["seconds"]))
    assert (
        shown["series"]["eval_loss"]["mean"] == [None, 3.5, None, None]
        and max(shown["series"]["memory"]["high"]) == 9000
    )


def test_every_metric_of_an_evaluation_is_drawn(tmp_path: Path) -> None:
    evaluations = [
        {
            "event": "eval",
            "step": step,
            "loss": 3.0 - step,
            "rouge_l": score,
            "news/loss": 2.0,
            "rows": 64,
            "mine": True,
        }
        for step, score in ((1, 30.0), (2, 20.0))
    ]
    history = History(write(folders(tmp_path), "one", start(), step(1), *evaluations))
    series = drawn(history)["series"]
    assert series["eval_rouge_l"]["mean"] == [None, 30.0, 20.0] and series["eval_news/loss"]["mean"][1] == 2.0
    assert not {"eval_rows", "eval_mine"} & set(series)


def grid_of(losses: list[Any], seconds: Any = float) -> Grid:
    grid = Grid()
    for number, loss in enumerate(losses):
        grid.add(number, seconds(number), {"loss": loss})
    return grid


def drawn_grid(grid: Grid, first: int = 0) -> dict[str, Any]:
    return dict(grid.drawn(first))


def test_a_short_run_is_drawn_as_it_is_with_gaps_for_what_is_no_number() -> None:
    found = drawn_grid(grid_of([1.0, None, 3.0, 4.0]))
    assert found["steps"] == [0, 1, 2, 3] and found["series"]["loss"]["mean"] == [1.0, None, 3.0, 4.0]
    assert found["not_a_number"] == [1]
    part = drawn_grid(grid_of([float(step) for step in range(50)]), 47)
    assert part["series"]["loss"]["mean"] == [47.0, 48.0, 49.0] and part["first"] == 47


def test_a_metric_that_comes_later_is_drawn_anew() -> None:
    grid = grid_of([1.0, 2.0])
    version = grid.version
    grid.add(2, 2.0, {"eval_mine": 7.0})
    assert drawn_grid(grid)["series"]["eval_mine"]["mean"] == [None, None, 7.0] and grid.version > version


def test_a_long_run_has_few_points_and_keeps_its_spikes() -> None:
    losses: list[float | None] = [1.0] * 20_000
    losses[6_180], losses[1234] = 99.0, None
    found = drawn_grid(grid_of(losses))
    assert POINTS / 2 <= len(found["steps"]) <= POINTS
    assert max(found["series"]["loss"]["high"]) == 99.0 and min(found["series"]["loss"]["low"]) == 1.0
    spike = found["steps"][found["series"]["loss"]["high"].index(99.0)]
    (lost,) = found["not_a_number"]
    assert spike <= 6_180 < spike + found["width"] and lost <= 1234 < lost + found["width"]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000))
def test_buckets_hold_what_was_put_into_them(values: list[float]) -> None:
    grid = grid_of(values)
    curve, width = grid.curves["loss"], grid.width
    for place in range(grid.size):
        held = values[place * width : (place + 1) * width]
        assert curve.lows[place] == min(held) and curve.highs[place] == max(held)
        assert curve.counts[place] == len(held)
        assert math.isclose(curve.sums[place], sum(held), rel_tol=1e-9, abs_tol=1e-3)


def test_a_pause_parts_the_line_in_time_and_slow_steps_do_not() -> None:
    assert drawn_grid(grid_of([1.0] * 20, lambda step: step + 5000.0 * (step >= 12)))["breaks"] == [12]
    grid = grid_of([1.0] * 5000, lambda step: step + 5000.0 * (step >= 1801))
    (place,) = drawn_grid(grid)["breaks"]  # behind the bucket in whose middle it lies
    assert (place - 1) * grid.width < 1801 <= place * grid.width
    assert drawn_grid(grid_of([1.0] * 20, lambda step: step * 300.0))["breaks"] == []
