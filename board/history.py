"""A run's `metrics.jsonl`, read once and then only what was added.

Where the file was written anew, as by a run that goes back to a checkpoint or replaces another, it is read anew.
Memory: bounded, whatever the length of the run; see `board.series`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from board.series import Grid
from run_files import EVAL_COUNTS, LESS_IS_BETTER, EventReader

MARKS, SAMPLES, NOTES = 500, 36, 100  # kept of each, the newest
LONGEST_SAMPLE = 1500  # characters of each of its texts
INDEX_STEPS = 1000  # between two places in the file that are remembered
LOSS = "loss"  # of an evaluation
MOST_PHASES, MOST_STEPS = 20, 2**40
DRAWN = ("step", "eval", "memory")
# numbers of an `eval` event that are no metric
COUNTS = (*EVAL_COUNTS, "time", "seconds")
ODD = (KeyError, TypeError, ValueError, OverflowError)  # what comes of events that no run writes


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
        self._reader, self.grid = EventReader(self.path), Grid()
        self._clock, self._began = 0.0, math.nan  # seconds since the first step, and when that was
        self._index: list[tuple[int, int]] = []  # of steps, where the file goes on behind them
        self.settings: dict[str, Any] = {}
        self.train_rows = 0  # of an epoch; 0: the run does not say
        self.first_plan: dict[str, Any] = {}
        self.last_eval: dict[str, Any] = {}
        self.best_eval: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.phase_peaks: dict[str, int] = {}
        self.cleanups: deque[list[float]] = deque(maxlen=MARKS)
        self.saves: deque[int] = deque(maxlen=MARKS)
        self.notes: deque[dict[str, Any]] = deque(maxlen=NOTES)
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)

    def refresh(self, most_bytes: float = math.inf) -> int:
        """Read what was added since the last call, about `most_bytes` of it. Returns how many bytes that was."""
        with self.lock, suppress(OSError):
            if not self._reader.is_same():
                self._begin()
            before = self._reader.offset
            for event in self._reader.events(most_bytes):
                with suppress(*ODD):
                    self._take(event)
            return self._reader.offset - before
        return 0

    def _take(self, event: dict[str, Any]) -> None:
        kind, step = event["event"], event.get("step", 0)
        if kind in DRAWN:
            values = drawn_values(event)
            if kind == "step":
                self._clock = self._seconds(event)
            self.grid.add(step, self._clock, values)
            self.count += 1
            if memory := int(values.get("memory") or 0):
                phase = "train" if kind == "step" else str(event["phase"])[:40]
                if phase in self.phase_peaks or len(self.phase_peaks) < MOST_PHASES:
                    self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), memory)
        if kind == "start":
            self.settings, self.end, self.first_plan = dict(event["settings"]), {}, {}
            self.train_rows = int(event.get("train_rows") or 0)
        elif kind == "plan":
            self.first_plan = self.first_plan or event
        elif kind == "step" and (not self._index or step >= self._index[-1][0] + INDEX_STEPS):
            self._index.append((step, self._reader.offset))
        elif kind == "eval":
            self.last_eval = event
            metric = deciding_metric(self.settings)
            if is_better(metric, event.get(metric), self.best_eval.get(metric)):
                self.best_eval = event
        elif kind == "cleanup" and event["kind"] == "full":
            self.cleanups.append([step, int(event["freed_bytes"])])
        elif kind == "checkpoint":
            self.saves.append(step)
        elif kind == "recovery":
            self.notes.append({"step": step, "text": str(event.get("report", ""))[:1000]})
        elif kind == "sample":
            texts = {name: str(event.get(name, ""))[:LONGEST_SAMPLE] for name in ("prompt", "answer", "reference")}
            self.samples.append({"step": event.get("step"), **texts})
        elif kind == "end":
            self.end = event

    def _seconds(self, event: dict[str, Any]) -> float:
        """When a step was done, counted from the first one; by the steps' own times in files that tell no clock."""
        seconds, clock = self._clock + float(event.get("seconds") or 0.0), event.get("time")
        if not isinstance(clock, (int, float)):
            return seconds
        if math.isnan(self._began):
            self._began = clock - seconds
        return max(seconds, clock - self._began)

    def window(self, first: int, last: int) -> dict[str, object]:
        """The steps from `first` to `last` alone, on a finer grid: what a page draws when it is zoomed."""
        with self.lock:
            offset = next((behind for step, behind in reversed(self._index) if step < first), 0)
            grid, clock = Grid(first), self.grid
        for event in EventReader(self.path, offset).events():
            with suppress(*ODD):
                if event["event"] in DRAWN and event["step"] >= first:
                    values = drawn_values(event)
                    if event["step"] > last:
                        break
                    grid.add(event["step"], clock.time_of(event["step"]), values)
        return grid.drawn()


def drawn_values(event: dict[str, Any]) -> dict[str, float | None]:
    """What the charts show of a `step`, `eval` or `memory` event; None for what is no number.

    Raises:
        one of ODD: somebody else has written it.
    """
    if not 0 <= event["step"] < MOST_STEPS:
        raise ValueError
    if event["event"] == "eval":
        metrics = {name: value for name, value in event.items() if _is_number(value) and name not in COUNTS}
        return {"eval_loss": _number(event.get("loss")), **{f"eval_{name}": float(metrics[name]) for name in metrics}}
    if event["event"] == "memory":
        return {"memory": max(int(event["anon_bytes"]), int(event.get("device_bytes") or 0))}
    values = {
        "loss": _number(event["loss"]),
        "learning_rate": _number(event.get("learning_rate")),
        "speed": _number(event.get("tokens_per_second")),
    }
    memory = _number(event.get("memory_bytes"))
    return values if memory is None else {**values, "memory": memory}


def deciding_metric(settings: Mapping[str, Any]) -> str:
    """The number of an evaluation by which a run chooses its best checkpoint."""
    return str(settings.get("metric_for_best") or LOSS)


def is_better(metric: str, value: object, than: object) -> bool:
    """Whether a number of an evaluation is better than another, which may be missing."""
    new, old = _number(value), _number(than)
    if new is None or old is None:
        return new is not None
    return new < old if metric.rpartition("/")[2] in LESS_IS_BETTER else new > old


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None
