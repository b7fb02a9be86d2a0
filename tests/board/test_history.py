"""What a run has told is read once, and then only what was added."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from board.history import History
from tests.board.recorded import BEGAN, places, start, step, write


def drawn(history: History) -> dict[str, Any]:
    history.refresh()
    return dict(history.grid.drawn())


def test_a_file_that_is_not_there_tells_nothing(tmp_path: Path) -> None:
    assert not History(tmp_path / "metrics.jsonl").refresh()


def test_only_what_was_added_is_read(tmp_path: Path) -> None:
    path = write(places(tmp_path), "one", start(), step(1))
    history = History(path)
    assert history.refresh() and not history.refresh()
    with path.open("a") as file:
        file.write(json.dumps(step(2, 1.5)) + "\n")
    assert history.refresh()
    assert drawn(history)["loss"]["mean"] == [None, 2.0, 1.5] and history.generation == 1


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    whole = json.dumps(step(2, 7.0))
    path = write(places(tmp_path), "one", step(1), tail=whole[:20])
    history = History(path)
    assert drawn(history)["steps"] == [0, 1]
    with path.open("a") as file:
        file.write(whole[20:] + "\n")
    assert drawn(history)["loss"]["mean"] == [None, 2.0, 7.0]


def test_a_run_that_went_back_is_read_anew(tmp_path: Path) -> None:
    where = places(tmp_path)
    path = write(where, "one", *(step(n) for n in range(1, 9)))
    history = History(path)
    assert len(drawn(history)["steps"]) == 9
    shorter = path.with_suffix(".tmp")
    shorter.write_text("".join(json.dumps(step(n, 1.0)) + "\n" for n in range(1, 4)))
    os.replace(shorter, path)
    assert drawn(history)["loss"]["mean"] == [None, 1.0, 1.0, 1.0] and history.generation == 2


@pytest.mark.parametrize(
    "line",
    ["not json", "[1]", '{"event": 5}', '{"event": "step"}', '{"event": "step", "step": "x", "loss": 1}', "[" * 9999,
     '{"event": "step", "step": -4, "loss": 1}', '{"event": "step", "step": 1e99, "loss": 1}', '{"event": "memory"}',
     '{"event": "_begin"}', '{"event": "cleanup", "kind": "full"}', '{"event": "start", "settings": 7}'],
)  # fmt: skip
def test_what_is_no_event_is_passed_over(tmp_path: Path, line: str) -> None:
    path = write(places(tmp_path), "one", step(1), tail=f"{line}\n{json.dumps(step(2))}\n")
    assert drawn(History(path))["loss"]["mean"] == [None, 2.0, 2.0]


def test_a_loss_that_is_no_number_is_a_gap(tmp_path: Path) -> None:
    found = drawn(History(write(places(tmp_path), "one", step(1), step(2, None), step(3))))
    assert found["loss"]["mean"] == [None, 2.0, None, 2.0] and found["not_a_number"] == [2]


def test_files_of_before_have_a_time_of_their_own(tmp_path: Path) -> None:
    events = [{key: value for key, value in step(n).items() if key != "time"} for n in (1, 2, 3)]
    assert drawn(History(write(places(tmp_path), "one", *events)))["seconds"][1:] == [1.0, 2.0, 3.0]


def test_a_clock_that_was_set_back_does_not_turn_time_round(tmp_path: Path) -> None:
    path = write(places(tmp_path), "one", step(1), step(2, time=BEGAN - 500), step(3))
    seconds = drawn(History(path))["seconds"]
    assert seconds == sorted(seconds)


def test_all_that_is_not_drawn(tmp_path: Path) -> None:
    path = write(
        places(tmp_path), "one", start(), {"event": "plan", "peak_bytes": 9, "components": {"weights": 9}}, step(1),
        {"event": "eval", "step": 1, "loss": 3.0}, {"event": "eval", "step": 1, "loss": 2.5},
        {"event": "memory", "step": 1, "phase": "load", "anon_bytes": 700, "device_bytes": 0},
        {"event": "cleanup", "step": 1, "kind": "light", "freed_bytes": 1},
        {"event": "cleanup", "step": 1, "kind": "full", "freed_bytes": 5},
        {"event": "checkpoint", "step": 1, "path": "x", "best": True},
        {"event": "recovery", "step": 1, "report": "smaller"},
        {"event": "sample", "prompt": "p", "answer": "<script>", "reference": "r"}, {"event": "end", "seconds": 4.0},
    )  # fmt: skip
    history = History(path)
    history.refresh()
    assert history.settings["max_steps"] == 100 and history.first_plan["peak_bytes"] == 9
    assert history.best_eval["loss"] == 2.5 and history.phase_peaks == {"train": 1001, "load": 700}
    assert list(history.cleanups) == [[1, 5]] and list(history.saves) == [1]
    assert history.notes[0]["text"] == "smaller" and history.samples[0]["answer"] == "<script>"
    assert history.end["seconds"] == 4.0


def test_a_long_file_is_read_in_pieces(tmp_path: Path) -> None:
    path = write(places(tmp_path), "one", *(step(n) for n in range(1, 8000)))
    history = History(path)
    assert history.refresh(1) and history.is_behind
    for _ in range(9):
        history.refresh(1)
    assert not history.is_behind
    assert history.last_step["step"] == 7999


def test_a_window_shows_each_step(tmp_path: Path) -> None:
    path = write(places(tmp_path), "one", *(step(n, float(n)) for n in range(1, 5000)))
    history = History(path)
    history.refresh()
    found: dict[str, Any] = dict(history.window(3000, 3010))
    assert found["steps"] == list(range(3000, 3011))
    assert found["loss"]["mean"] == [float(n) for n in range(3000, 3011)]
    assert found["seconds"] == sorted(set(found["seconds"])), "each at its own time"


def test_a_run_that_takes_the_place_of_another_is_read_anew(tmp_path: Path) -> None:
    """The same file is emptied and grows past what was read of it."""
    path = write(places(tmp_path), "one", {**start(), "time": 1.0}, step(1), step(2))
    history = History(path)
    assert drawn(history)["loss"]["mean"] == [None, 2.0, 2.0]
    number = path.stat().st_ino
    path.write_text(
        "".join(json.dumps(event) + "\n" for event in ({**start(), "time": 9.0}, *(step(n, 1.0) for n in (1, 2, 3))))
    )
    assert path.stat().st_ino == number
    assert drawn(history)["loss"]["mean"] == [None, 1.0, 1.0, 1.0]


def test_a_window_shows_evaluations_and_peaks_too(tmp_path: Path) -> None:
    found = [step(n) for n in range(1, 20)]
    found[9:9] = [{"event": "eval", "step": 9, "loss": 3.5}, {"event": "memory", "step": 9, "phase": "evaluation", "anon_bytes": 9000}]  # fmt: skip
    history = History(write(places(tmp_path), "one", *found))
    history.refresh()
    shown: dict[str, Any] = dict(history.window(8, 12))
    assert shown["steps"] == [8, 9, 10, 11, 12]
    assert shown["eval_loss"]["mean"] == [None, 3.5, None, None, None] and max(shown["memory"]["high"]) == 9000
