"""A run's events are read on from where one was."""

from __future__ import annotations

import json
from pathlib import Path

from training.report.run_files import EventReader


def lines(*steps: int) -> str:
    return "".join(json.dumps({"event": "step", "step": step}) + "\n" for step in steps)


def read(reader: EventReader) -> list[int]:
    return [event["step"] for event in reader.events()]


def test_only_what_was_added_is_read_and_a_file_that_was_written_anew_is_known(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2) + '{"event": "step", ')
    reader = EventReader(path)
    assert read(reader) == [1, 2] and read(reader) == [], "a torn line waits"
    with path.open("a") as file:
        file.write('"step": 3}\n')
    assert reader.is_same() and read(reader) == [3]
    assert read(EventReader(path, 5)) == [2, 3], "a reader that begins within a line passes over it"
    assert [event["step"] for event in EventReader(path).events(1)] == [1], "in pieces"
    for content in (lines(1, 2, 4, 5), ""):
        path.write_text(content)
        assert not reader.is_same()
