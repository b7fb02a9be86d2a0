"""The files by which a run is known, and how they are read: by the run itself, its card, `history`, `runs` and the
page.

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

from common.storage import open_plain, read_text

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
MOST_DIGITS = 20  # A whole number with more is no count.


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
    1 MiB.

    Args:
        path: of the file. offset: where to begin; within a line, behind it.
    Memory: a line.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset
        self._last = b""  # what stands before the offset

    def is_same(self) -> bool:
        """Whether what was read is still there: a run that goes back, or that replaces another, writes the file anew.

        Raises:
            OSError: it is not there.
        """
        with open_plain(self.path) as file:
            file.seek(self.offset - len(self._last))
            return file.read(len(self._last)) == self._last

    def events(self, most_bytes: float = math.inf) -> Iterator[dict[str, Any]]:
        """The events of about so many bytes more: `event` a text, `step`, where there is one, a whole number.

        Raises:
            OSError: the file cannot be read.
        """
        end = self.offset + most_bytes
        with open_plain(self.path) as file:
            file.seek(max(0, self.offset - 1))
            is_begun = self.offset == 0 or file.read(1) == b"\n"  # else within a line that is passed over
            while self.offset < end and (line := file.readline(LONGEST_LINE)):
                is_ended = line.endswith(b"\n")
                if not is_ended and len(line) < LONGEST_LINE:
                    return
                self.offset, self._last = self.offset + len(line), line
                event = _event_of(line) if is_begun and is_ended else None
                is_begun = is_ended
                if event is not None:
                    yield event


def _event_of(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None where it holds none."""
    try:
        event = _json_of(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("step", 0)) is int
    return event if is_event else None


def read_record(path: Path) -> dict[str, Any]:
    """A small JSON object that somebody may be replacing; empty where there is none."""
    try:
        content = _json_of(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _json_of(text: str | bytes) -> Any:
    """JSON with null for numbers that are not finite, and for whole ones of more digits than any count has.

    Raises:
        ValueError, RecursionError: it is none.
    """
    return json.loads(text, parse_constant=lambda _: None, parse_float=_finite, parse_int=_count)


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def _count(digits: str) -> int | None:
    return int(digits) if len(digits) <= MOST_DIGITS else None
