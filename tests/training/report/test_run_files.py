"""A run's events are read on from where one was, whatever lies in the file."""

from __future__ import annotations

import json
from pathlib import Path

from training.report.run_files import LONGEST_LINE, EventReader, read_record


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


def test_what_is_no_event_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = ["not json", "[1]", '{"event": 5}', '{"event": "step", "step": "x"}', "[" * 9999]
    path.write_bytes((lines(1) + "\n".join(odd) + "\n").encode() + bytes(3 * LONGEST_LINE))
    reader = EventReader(path)
    assert read(reader) == [1] and reader.offset > 3 * LONGEST_LINE, "what a loss of power leaves is read once"
    with path.open("ab") as file:
        file.write(bytes(10) + b"\n" + lines(2).encode())
    assert read(reader) == [2] and read(EventReader(path)) == [1, 2]


def test_a_record_holds_finite_numbers_and_odd_files_count_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(f'{{"a": NaN, "b": 1e999, "c": {10**400}, "d": -2, "e": 0.5}}')
    assert read_record(path) == {"a": None, "b": None, "c": None, "d": -2, "e": 0.5}
    for junk in ("", "[]", "nonsense", "[" * 5000):
        path.write_text(junk)
        assert read_record(path) == {}
