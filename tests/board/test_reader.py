"""The events of a run, as its page draws them: a chart of any length has five hundred points, and loses no spike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from board.reader import POINTS, Grid, History
from tests.board.recorded import folders, start, step, write


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


def test_a_long_run_has_few_points_and_keeps_its_spikes() -> None:
    losses: list[float | None] = [1.0] * 20_000
    losses[6_180] = 99.0
    losses[1234] = None
    grid = Grid()
    for number, loss in enumerate(losses):
        grid.add(number, float(number), {"loss": loss})
    chart: Any = grid.drawn()
    loss = chart["series"]["loss"]
    assert POINTS / 2 <= len(chart["steps"]) <= POINTS
    assert max(loss["high"]) == 99.0 and min(loss["low"]) == 1.0
    spike = chart["steps"][loss["high"].index(99.0)]
    (gap,) = chart["not_a_number"]
    assert spike <= 6_180 < spike + chart["width"] and gap <= 1234 < gap + chart["width"]
