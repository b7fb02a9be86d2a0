"""The record of a run, and its one reader: what the card, `history`, `runs` and the page know of a run comes from here.

A run is a folder of `log_dir` with a `metrics.jsonl`, `launch.json` or `heartbeat.json`, or one of `output_dir` with a
`run.json`. Any of them may be of another version or be written by somebody else: what cannot be read counts as not
there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.storage import open_plain, read_text

METRICS_FILE = "metrics.jsonl"
HEARTBEAT_FILE = "heartbeat.json"
REQUEST_FILE = "request"
LAUNCH_FILE = "launch.json"
RUN_FILE = "run.json"
SETTINGS_FILE = "settings.json"
OWNER_FILE = "owner.json"
# The numbers of an `eval` event that are no score: which step, and of how much.
EVAL_COUNTS = ("step", "rows", "tokens", "answered_rows", "averaged_checkpoints")
LESS_IS_BETTER = ("loss", "mse")  # Scores, also those of one validation set, such as news/loss.
LONGEST_LINE = 2**20
Record = dict[str, Any]


def run_names(log_dir: Path, output_dir: Path) -> list[str]:
    """Names of all runs, sorted; hidden folders are none."""
    names = {folder.name for folder in saved_runs(output_dir)}
    for file in (METRICS_FILE, LAUNCH_FILE, HEARTBEAT_FILE):
        names |= {path.parent.name for path in log_dir.glob(f"*/{file}")}
    return sorted(name for name in names if not name.startswith("."))


def saved_runs(output_dir: Path) -> list[Path]:
    """Folders of `output_dir` that hold a run."""
    return [path.parent for path in output_dir.glob(f"*/{RUN_FILE}") if not path.parent.name.startswith(".")]


class EventReader:
    """Reads a `metrics.jsonl` from where it has come to: what is there, and later what was added.

    A line that is still being written waits for its end. What is no event is passed over: a torn line, one of more than
    1 MiB, and the rest of a line in which the reader began.

    Args:
        path: of the file. offset: where to begin, in bytes.
    Memory: a line.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self._last_line = b""

    def is_same(self) -> bool:
        """Whether what was read is still there: a run that goes back, or that replaces another, writes the file anew.

        Raises:
            OSError: it is not there.
        """
        with open_plain(self.path) as file:
            file.seek(self.offset - len(self._last_line))
            return file.read(len(self._last_line)) == self._last_line

    def events(self, most_bytes: float = math.inf) -> Iterator[Record]:
        """The events of about so many bytes more: `event` a text, `step`, where there is one, a whole number.

        Raises:
            OSError: the file cannot be read.
        """
        end = self.offset + most_bytes
        with open_plain(self.path) as file:
            file.seek(self.offset)
            while self.offset < end and (line := file.readline(LONGEST_LINE)):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    return
                self.offset += len(line)
                self._last_line = line
                event = _object_of(line)
                is_step_whole = type(event.get("step", 0)) is int
                if isinstance(event.get("event"), str) and is_step_whole and line.endswith(b"\n"):
                    yield event


class LatestEvents(dict[str, Record]):
    """The newest event of each kind, empty where there was none. A new start drops the plan, the end and the failure of
    the start before it.
    """

    def add(self, event: Record) -> None:
        """Take the next event."""
        if event["event"] == "start":
            for kind in ("plan", "end", "failed"):
                self.pop(kind, None)
        self[event["event"]] = event

    def __missing__(self, kind: str) -> Record:
        return {}


def read_record(path: Path) -> Record:
    """A small JSON object that somebody may be replacing; empty where there is none."""
    try:
        return _object_of(read_text(path))
    except (OSError, ValueError):
        return {}


def number_of(value: object) -> float | None:
    """A value where it is a number."""
    return value if type(value) in (int, float) else None  # type: ignore[return-value]


def _object_of(text: str | bytes) -> Record:
    """The JSON object of a text, empty if it is none."""
    try:
        content = json.loads(text, parse_constant=lambda _: None, parse_float=_finite, parse_int=_finite)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _finite(digits: str) -> float | None:
    """A number, or None for one that no float can hold."""
    number = float(digits)
    if not math.isfinite(number):
        return None
    return int(digits) if digits.lstrip("-").isdecimal() else number
