"""Files of a run that no run writes: it is shown as failed or without them, and all others as they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from board.history import LONGEST_LINE, History
from board.launching import Launcher
from board.places import Places
from board.runs import list_runs

STEP = {"event": "step", "step": 1, "loss": 2.5, "time": 1.0, "seconds": 1.0, "tokens": 10}
BEAT = {"state": "running", "time": 5.0, "max_steps": 10}
ODD = ["x", [1], {"a": 1}, -1, True, 10**400, "1e999", "NaN", None]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    folders = [tmp_path / name for name in ("logs", "models", "data")]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "logs" / "good").mkdir()
    (tmp_path / "logs" / "good" / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    return Places(*folders)


def written(value: object) -> str:
    return value if value in ("1e999", "NaN") else json.dumps(value)  # type: ignore[return-value]


def table(content: dict[str, object], name: str, value: object) -> str:
    parts = [f'"{key}": {written(value) if key == name else json.dumps(old)}' for key, old in content.items()]
    return "{" + ", ".join(parts) + "}"


def shown(places: Places) -> dict[str, Any]:
    runs = list_runs(places, now=10.0)
    json.dumps(runs, allow_nan=False)
    by_name = {run["name"]: run for run in runs}
    assert by_name["good"]["loss"] == 2.5 and by_name["good"]["step"] == 1
    return by_name


@pytest.mark.parametrize("value", ODD, ids=[str(value)[:10] for value in ODD])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("heartbeat.json", BEAT | {"started": 1.0, "peak_bytes": 5, "phase": "train", "doing": {}}),
        ("launch.json", {"command": "train", "flags": {}, "asked": 3.0, "process": 9, "planned_peak_bytes": 7}),
        ("metrics.jsonl", STEP | {"learning_rate": 0.1, "tokens_per_second": 9.0}),
        ("metrics.jsonl", {"event": "start", "time": 1.0, "settings": {"max_steps": 5}}),
        ("metrics.jsonl", {"event": "end", "time": 1.0, "step": 3, "measured_peak_bytes": 5, "best_eval_loss": 1.0}),
    ],
)
def test_a_run_with_odd_values_hides_no_other(places: Places, file: str, content: dict[str, Any], value: Any) -> None:
    (places.log_dir / "bad").mkdir()
    for name in content:
        (places.log_dir / "bad" / file).write_text(table(content, name, value) + "\n")
        assert "bad" in shown(places)
        history = History(places.log_dir / "bad" / "metrics.jsonl")
        history.refresh()
        if history.path.is_file():
            json.dumps(history.window(0, 10), allow_nan=False)


@pytest.mark.parametrize("line", ['{"event": "step", "loss": 1}', '{"event": "step"}', "[]", "7", '{"event": 3}'])
def test_events_without_what_they_need_hide_no_other(places: Places, line: str) -> None:
    (places.log_dir / "bad").mkdir()
    (places.log_dir / "bad" / "metrics.jsonl").write_text(line + "\n")
    assert "bad" in shown(places)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_waited_for(places: Places) -> None:
    (places.log_dir / "bad").mkdir()
    for name in ("metrics.jsonl", "heartbeat.json", "launch.json"):
        os.mkfifo(places.log_dir / "bad" / name)
    assert "bad" in shown(places)
    assert not History(places.log_dir / "bad" / "metrics.jsonl").refresh()


def test_a_line_without_end_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(json.dumps(STEP).encode() + b"\n" + bytes(3 * LONGEST_LINE))
    history = History(path)
    history.refresh()
    assert history.last_step["step"] == 1 and history._offset > 3 * LONGEST_LINE
    with path.open("ab") as file:
        file.write(bytes(LONGEST_LINE) + b"\n" + json.dumps(STEP | {"step": 2}).encode() + b"\n")
    history.refresh()
    assert history.last_step["step"] == 2
    assert History.refresh(whole := History(path)) and whole.count == 2
    assert 1 in history.window(0, 10)["steps"] and 2 in history.window(0, 10)["steps"]  # type: ignore[operator]


def test_the_queue_outlives_what_it_cannot_read(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    launcher, asked = Launcher.__new__(Launcher), list[int]()

    async def start_next() -> None:
        asked.append(1)
        if len(asked) > 2:
            raise asyncio.CancelledError
        raise KeyError("step")

    monkeypatch.setattr("board.launching.QUEUE_SECONDS", 0.0)
    monkeypatch.setattr(launcher, "count_ended", lambda: None, raising=False)
    monkeypatch.setattr(launcher, "start_next", start_next)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(launcher.work())
    assert len(asked) == 3
