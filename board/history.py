"""What has a run told so far? Its `metrics.jsonl`, read once and then only what was added.

The file may be replaced by a shorter one, as a run does that goes back to a checkpoint, or begun anew in its place, as a run
does that replaces another: then it is read anew. A line
that is still being written waits for its end; one that is no event is passed over.
Memory: bounded, whatever the length of the run; see `board.series`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from board.places import plain_json
from board.series import Grid
from storage import open_plain

METRICS_FILE = "metrics.jsonl"
MARKS, SAMPLES, NOTES = 500, 12, 100  # kept of each, the newest
INDEX_STEPS = 1000  # between two places in the file that are remembered
CHUNK_BYTES = LONGEST_LINE = 2**20
HEAD_BYTES = 1024  # by which a file is known that was emptied and written again; the first event tells when


class History:
    """The events of one run. Safe to read from several threads.

    Args:
        path: of its metrics.jsonl, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.generation = path, 0
        self.lock = threading.RLock()  # held while it changes; readers hold it for what they read
        self._begin()

    def _begin(self) -> None:
        self.generation += 1
        self.count = 0  # of what was drawn
        self.is_behind = False
        self._file: tuple[int, int] | None = None
        self._head = b""
        self._offset, self._clock = 0, 0.0
        self._is_inside = False  # of a line whose beginning was passed over
        self._began: float | None = None
        self.grid = Grid()
        self.settings: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        self.first_plan: dict[str, Any] = {}
        self.last_step: dict[str, Any] = {}
        self.last_eval: dict[str, Any] = {}
        self.best_eval: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.phase_peaks: dict[str, int] = {}
        self.cleanups: deque[list[float]] = deque(maxlen=MARKS)
        self.saves: deque[int] = deque(maxlen=MARKS)
        self.notes: deque[dict[str, Any]] = deque(maxlen=NOTES)
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self._index: list[tuple[int, int]] = []

    def refresh(self, most_bytes: int = 2**62) -> bool:
        """Read what was added since the last call, about `most_bytes` of it. Returns whether there was anything."""
        with self.lock:
            try:
                found = self.path.stat()
            except OSError:
                return False
            is_other = self._file is not None and (found.st_ino, found.st_dev) != self._file
            head = self._head_now() if found.st_size else b""
            if is_other or found.st_size < self._offset or not head.startswith(self._head):
                self._begin()
            self._file, self._head = (found.st_ino, found.st_dev), head
            if found.st_size == self._offset:
                self.is_behind = False
                return False
            return self._read(most_bytes)

    def _head_now(self) -> bytes:
        with open_plain(self.path) as file:
            return file.read(HEAD_BYTES)

    def _read(self, most_bytes: int) -> bool:
        before = self._offset
        with open_plain(self.path) as file:
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(CHUNK_BYTES):
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                for line in lines:
                    if not self._is_inside:
                        self._take(line, self._offset)
                    self._is_inside = False
                    self._offset += len(line) + 1
                if len(rest) > LONGEST_LINE:  # no event: what a power failure leaves in a file
                    self._offset, self._is_inside, rest = self._offset + len(rest), True, b""
                if self._offset - before >= most_bytes:
                    break
            self.is_behind = bool(chunk)
        return self._offset > before

    def _take(self, line: bytes, offset: int) -> None:
        try:
            event = plain_json(line)
            kind = event["event"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        taker = getattr(self, f"_take_{kind}", None) if isinstance(kind, str) else None
        if taker is not None:
            self.count += 1
            try:
                taker(event, offset)
            except (KeyError, TypeError, ValueError, OverflowError):  # of a file that somebody else has written
                return

    def _take_start(self, event: dict[str, Any], offset: int) -> None:
        self.settings = dict(event["settings"])
        self.end, self.first_plan = {}, {}

    def _take_plan(self, event: dict[str, Any], offset: int) -> None:
        self.plan = event
        self.first_plan = self.first_plan or event

    def _take_step(self, event: dict[str, Any], offset: int) -> None:
        step = _step(event)
        seconds, values = self._seconds(event), values_of(event)
        self.grid.add(step, seconds, values)
        self.phase_peaks["train"] = max(self.phase_peaks.get("train", 0), int(values.get("memory") or 0))
        if not self._index or step >= self._index[-1][0] + INDEX_STEPS:
            self._index.append((step, offset))
        self.last_step = event

    def _seconds(self, event: dict[str, Any]) -> float:
        """When a step was done, counted from the first one; by the steps' own times in files that tell no clock."""
        own, clock = float(event.get("seconds") or 0.0), event.get("time")
        self._clock += own
        if not isinstance(clock, (int, float)):
            return self._clock
        if self._began is None:
            self._began = clock - self._clock
        self._clock = max(self._clock, clock - self._began)
        return self._clock

    def _take_eval(self, event: dict[str, Any], offset: int) -> None:
        self.grid.add(_step(event), self._clock, {"eval_loss": _number(event.get("loss"))})
        self.last_eval = event
        if _number(event.get("loss")) is not None and event["loss"] <= self.best_eval.get("loss", event["loss"]):
            self.best_eval = event

    def _take_memory(self, event: dict[str, Any], offset: int) -> None:
        held = _held(event)
        self.grid.add(_step(event), self._clock, {"memory": held})
        phase = str(event["phase"])[:40]
        if phase in self.phase_peaks or len(self.phase_peaks) < 20:
            self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), held)

    def _take_cleanup(self, event: dict[str, Any], offset: int) -> None:
        if event["kind"] == "full":
            self.cleanups.append([_step(event), int(event["freed_bytes"])])

    def _take_checkpoint(self, event: dict[str, Any], offset: int) -> None:
        self.saves.append(_step(event))

    def _take_recovery(self, event: dict[str, Any], offset: int) -> None:
        self.notes.append({"step": _step(event), "text": str(event.get("report", ""))[:1000]})

    def _take_sample(self, event: dict[str, Any], offset: int) -> None:
        texts = {name: str(event.get(name, ""))[:4000] for name in ("prompt", "answer", "reference")}
        self.samples.append({"step": event.get("step"), **texts})

    def _take_end(self, event: dict[str, Any], offset: int) -> None:
        self.end = event

    def window(self, first: int, last: int) -> dict[str, object]:
        """The steps from `first` to `last` alone, on a finer grid: what a page draws when it is zoomed."""
        with self.lock:
            offset = next((place for step, place in reversed(self._index) if step <= first), 0)
            grid, clock = Grid(first), self.grid
        with open_plain(self.path) as file:
            file.seek(offset)
            while line := file.readline(LONGEST_LINE):
                try:
                    event = plain_json(line)
                    kind, step = event.get("event"), event["step"]
                    if kind not in DRAWN or step < first:
                        continue
                    if step > last:
                        break
                    grid.add(step, clock.time_of(step), DRAWN[kind](event))
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    continue
        return grid.drawn()


def _held(event: dict[str, Any]) -> int:
    """Bytes that a `memory` event tells of."""
    return max(int(event["anon_bytes"]), int(event.get("device_bytes") or 0))


def values_of(event: dict[str, Any]) -> dict[str, float | None]:
    """The drawn quantities of a `step` event."""
    values = {
        "loss": _number(event["loss"]),
        "learning_rate": _number(event.get("learning_rate")),
        "speed": _number(event.get("tokens_per_second")),
    }
    memory = _number(event.get("memory_bytes"))
    return values if memory is None else {**values, "memory": memory}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _step(event: dict[str, Any]) -> int:
    step = int(event["step"])
    if not 0 <= step < 2**40:
        raise ValueError
    return step


DRAWN: dict[str, Callable[[dict[str, Any]], dict[str, float | None]]] = {
    "step": values_of,
    "eval": lambda event: {"eval_loss": _number(event.get("loss"))},
    "memory": lambda event: {"memory": _held(event)},
}  # what a chart shows of each event
