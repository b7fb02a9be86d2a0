"""The events of a run, as its page draws them: a chart of any length has five hundred points, and loses no spike."""

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


def test_what_was_added_is_drawn_and_a_run_that_went_back_is_read_anew(tmp_path: Path) -> None:
    assert not History(tmp_path / "metrics.jsonl").refresh()
    path = write(folders(tmp_path), "one", start(), step(1))
    history = History(path)
    assert history.refresh() and not history.refresh()
    with path.open("a") as file:
        file.write(json.dumps(step(2, None)) + "\n" + json.dumps(step(3, 1.5)) + "\n")
    chart = drawn(history)
    assert chart["series"]["loss"]["mean"] == [None, 2.0, None, 1.5] and chart["not_a_number"] == [2]
    assert history.generation == 1
    shorter = path.with_suffix(".tmp")
    shorter.write_text("".join(json.dumps(step(n, 1.0)) + "\n" for n in range(1, 3)))
    os.replace(shorter, path)
    assert drawn(history)["series"]["loss"]["mean"] == [None, 1.0, 1.0] and history.generation == 2


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
    assert drawn(history)["series"]["loss"]["mean"] == [None, 2.0, 2.0] and history.settings() == {}
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
        {"event": "plan", "peak_bytes": 8},
        start(),
        {"event": "plan", "peak_bytes": 9, "components": {"weights": 9}},
        step(1),
        {"event": "plan", "peak_bytes": 7},
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
    assert history.settings()["max_steps"] == 100 and history.latest["plan"]["peak_bytes"] == 9, (
        "of this start, the first"
    )
    assert history.phase_peaks == {"train": 1001, "load": 700}
    assert list(history.cleanups) == [[1, 5]] and list(history.saves) == [1]
    assert history.notes[0]["text"] == "smaller" and history.samples[0]["answer"] == "<script>"
    assert history.latest["end"]["seconds"] == 4.0


def test_a_window_shows_each_step_at_its_time_with_evaluations_and_peaks(tmp_path: Path) -> None:
    events = [step(n, float(n)) for n in range(1, 2500)]
    events[1500:1500] = [
        {"event": "eval", "step": 1500, "loss": 3.5},
        {"event": "memory", "step": 1500, "phase": "evaluation", "anon_bytes": 9000},
    ]
    history = History(write(folders(tmp_path), "one", *events))
    while history.refresh(20_000):  # A long file is read in pieces.
        pass
    window: dict[str, Any] = dict(history.window(1499, 1502))
    series = window["series"]
    assert window["steps"] == series["loss"]["mean"] == [1499, 1500, 1501, 1502]
    assert window["seconds"] == sorted(set(window["seconds"]))
    assert series["eval_loss"]["mean"] == [None, 3.5, None, None] and max(series["memory"]["high"]) == 9000


def test_every_metric_of_an_evaluation_is_drawn(tmp_path: Path) -> None:
    evaluation = {"event": "eval", "loss": 2.0, "news/loss": 2.0, "rows": 64, "mine": True}
    evaluations = [{**evaluation, "step": 1, "rouge_l": 30.0}, {**evaluation, "step": 2, "rouge_l": 20.0}]
    series = drawn(History(write(folders(tmp_path), "one", start(), step(1), *evaluations)))["series"]
    assert series["eval_rouge_l"]["mean"] == [None, 30.0, 20.0] and series["eval_news/loss"]["mean"][1] == 2.0
    assert not {"eval_rows", "eval_mine"} & set(series)


def grid_of(losses: list[Any], seconds: Any = float) -> Grid:
    grid = Grid()
    for number, loss in enumerate(losses):
        grid.add(number, seconds(number), {"loss": loss})
    return grid


def test_a_short_run_is_drawn_as_it_is_with_gaps_for_what_is_no_number() -> None:
    grid = grid_of([1.0, None, 3.0, 4.0])
    chart: Any = grid.drawn()
    assert chart["steps"] == [0, 1, 2, 3] and chart["series"]["loss"]["mean"] == [1.0, None, 3.0, 4.0]
    assert chart["not_a_number"] == [1]
    part: Any = grid.drawn(2)
    assert part["series"]["loss"]["mean"] == [3.0, 4.0] and part["first"] == 2
    version = grid.version
    grid.add(4, 4.0, {"eval_mine": 7.0})
    later: Any = grid.drawn()
    assert later["series"]["eval_mine"]["mean"] == [None] * 4 + [7.0] and grid.version > version


def test_a_long_run_has_few_points_and_keeps_its_spikes() -> None:
    losses: list[float | None] = [1.0] * 20_000
    losses[6_180] = 99.0
    losses[1234] = None
    chart: Any = grid_of(losses).drawn()
    loss = chart["series"]["loss"]
    assert POINTS / 2 <= len(chart["steps"]) <= POINTS
    assert max(loss["high"]) == 99.0 and min(loss["low"]) == 1.0
    spike = chart["steps"][loss["high"].index(99.0)]
    (gap,) = chart["not_a_number"]
    assert spike <= 6_180 < spike + chart["width"] and gap <= 1234 < gap + chart["width"]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=1200))
def test_buckets_hold_what_was_put_into_them(values: list[float]) -> None:
    grid = grid_of(values)
    curve = grid.curves["loss"]
    for bucket in range(grid.size):
        part = values[bucket * grid.width : (bucket + 1) * grid.width]
        assert (curve.lows[bucket], curve.highs[bucket], curve.counts[bucket]) == (min(part), max(part), len(part))
        assert math.isclose(curve.sums[bucket], sum(part), rel_tol=1e-9, abs_tol=1e-3)


def test_a_pause_parts_the_line_in_time_and_slow_steps_do_not() -> None:
    assert grid_of([1.0] * 20, lambda step: step + 5000.0 * (step >= 12)).drawn()["breaks"] == [12]
    assert grid_of([1.0] * 20, lambda step: step * 300.0).drawn()["breaks"] == []
    grid = grid_of([1.0] * 5000, lambda step: step + 5000.0 * (step >= 1801))
    breaks: Any = grid.drawn()["breaks"]
    (bucket,) = breaks  # The line breaks behind the bucket in whose middle the pause lies.
    assert (bucket - 1) * grid.width < 1801 <= bucket * grid.width
