"""A run's events are read on from where one was, whatever lies in the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from training.report.run_files import LONGEST_LINE, EventReader, read_record, run_names


def lines(*steps: int) -> str:
    return "".join(json.dumps({"event": "step", "step": step}) + "\n" for step in steps)


def read(reader: EventReader) -> list[int]:
    return [event["step"] for event in reader.events()]


def test_only_what_was_added_is_read_and_a_torn_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2) + '{"event": "step", ')
    reader = EventReader(path)
    assert read(reader) == [1, 2] and read(reader) == []
    with path.open("a") as file:
        file.write('"step": 3}\n')
    assert reader.is_same() and read(reader) == [3]
    assert read(EventReader(path, 5)) == [2, 3], "from within a line: behind it"
    assert [event["step"] for event in EventReader(path).events(1)] == [1], "in pieces"


def test_what_is_no_event_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = ["not json", "[1]", '{"event": 5}', '{"event": "step", "step": "x"}', "[" * 9999]
    path.write_bytes((lines(1) + "\n".join(odd) + "\n").encode() + bytes(3 * LONGEST_LINE))
    reader = EventReader(path)
    assert read(reader) == [1] and reader.offset > 3 * LONGEST_LINE, "what a loss of power leaves is read once"
    with path.open("ab") as file:
        file.write(bytes(10) + b"\n" + lines(2).encode())
    assert read(reader) == [2] and read(EventReader(path)) == [1, 2]


def test_numbers_that_json_lacks_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'{{"a": NaN, "b": 1e999, "c": {10**400}, "d": 2}}')
    assert read_record(tmp_path / "a.json") == {"a": None, "b": None, "c": None, "d": 2}
    for junk in ("", "[]", "nonsense", "[" * 5000):
        (tmp_path / "a.json").write_text(junk)
        assert read_record(tmp_path / "a.json") == {}


def test_a_file_that_was_written_anew_is_known(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2))
    reader = EventReader(path)
    read(reader)
    path.write_text(lines(1, 3, 4))  # the same file, and longer than what was read of it
    assert not reader.is_same()
    path.write_text("")
    assert not reader.is_same()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_record(tmp_path / "pipe") == {}
    with pytest.raises(OSError):
        read(EventReader(tmp_path / "pipe"))


def test_names_of_runs(tmp_path: Path) -> None:
    for file in (
        "logs/a/metrics.jsonl",
        "logs/b/heartbeat.json",
        "logs/c/x",
        "models/b/run.json",
        "models/.d/run.json",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    assert run_names(tmp_path / "logs", tmp_path / "models") == ["a", "b"]
