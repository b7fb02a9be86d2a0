"""What the page reads: paths below its three folders, and the events of a run as curves of bounded size.

Whatever a browser names is a name inside one of three folders. It is resolved, links included, before it is opened:
what lies outside does not exist for the page. Of a run's `metrics.jsonl` only what was added is read; where the file
was written anew, as by a run that goes back to a checkpoint or replaces another, it is read anew.
"""

from __future__ import annotations

import math
import operator
import os
import statistics
import threading
from array import array
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.sources.formats import COMPRESSED_SUFFIXES, KIND_BY_SUFFIX
from settings.fields import is_encodable
from settings.names import name_problem, shown_name
from support.language import say
from training.report.run_files import EVAL_COUNTS, EventReader, LatestEvents, Record, number_of, run_names

DATA_SUFFIXES = (*KIND_BY_SUFFIX, *COMPRESSED_SUFFIXES)
# Files of a model or of prepared rows; a folder with one of them holds no data files.
PROGRAM_FILES = {"config.json", "adapter_config.json", "manifest.json", "tokenizer.json"}
MOST_DATA_FILES = 500

POINTS = 500
CURVES = ("loss", "eval_loss", "learning_rate", "speed", "memory")
MOST_CURVES = 48  # CURVES, and the metrics of evaluations
# A pause between two points this long, and this many times the usual one, breaks a line in time.
BREAK_SECONDS = 60.0
BREAK_FACTOR = 10.0

MARKS = 500  # The newest of each kind are kept.
SAMPLES = 36
NOTES = 100
LONGEST_SAMPLE = 1500  # characters of each of its texts
LONGEST_NOTE = 1000
INDEX_STEPS = 1000  # between two offsets of the file that are remembered
MOST_PHASES = 20
MOST_STEPS = 2**40
# Numbers of an `eval` event that are no metric.
COUNTS = (*EVAL_COUNTS, "time", "seconds")
# Raised by events that no run writes.
ODD = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)


class Outside(ValueError):
    """A name that leads out of the folders, or is not a name at all."""


@dataclass(frozen=True)
class Folders:
    """The three folders of the page.

    Args:
        log_dir, output_dir: as the runs have them. data_dir: where data files are picked from and uploaded to.
    """

    log_dir: Path
    output_dir: Path
    data_dir: Path

    def names(self) -> list[str]:
        """Names of all runs."""
        return run_names(self.log_dir, self.output_dir)

    def logs(self, name: str) -> Path:
        """The log folder of a run."""
        return inside(self.log_dir, checked_name(name))

    def saved(self, name: str) -> Path:
        """The model folder of a run."""
        return inside(self.output_dir, checked_name(name))

    def both(self, name: str) -> tuple[Path, Path]:
        """The log folder and the model folder of a run that is there, also of one whose name a new one could not have.

        Raises:
            Outside: the name leads elsewhere.
        """
        if Path(name).name != name:
            raise Outside(say("{shown_name!r} is not a folder name", shown_name=shown_name(name)))
        return inside(self.log_dir, name), inside(self.output_dir, name)

    def data(self, relative: str) -> Path:
        """A file of the data folder, which is there: no pattern, no list and no address, as a flag could hold.

        Raises:
            Outside: it is none.
        """
        path = inside(self.data_dir, relative)
        if not path.is_file():
            raise Outside(say("there is no data file {relative!r}", relative=relative[:80]))
        return path

    def model(self, relative: str) -> Path:
        """A model folder: that of a run, or of one of its checkpoints.

        Raises:
            Outside: it is none.
        """
        path = inside(self.output_dir, relative)
        if not path.is_dir() or path.resolve() == self.output_dir.resolve():
            raise Outside(say("there is no model {relative!r}", relative=relative[:80]))
        return path

    def data_files(self) -> list[dict[str, Any]]:
        """The data files below the data folder, newest first: not what runs have written, models and prepared rows, nor
        what is hidden.
        """
        files = []
        run_folders = {self.log_dir.resolve(), self.output_dir.resolve()}
        for root, folders, names in os.walk(self.data_dir):
            folder = Path(root)
            if not PROGRAM_FILES.isdisjoint(names) and folder != self.data_dir:
                folders.clear()
                continue
            folders[:] = [name for name in folders if name[0] != "." and (folder / name).resolve() not in run_folders]
            files += [folder / name for name in names if self._is_data(folder / name)]
            if len(files) >= MOST_DATA_FILES:
                break
        entries = [
            {
                "name": path.relative_to(self.data_dir).as_posix(),
                "bytes": path.stat().st_size,
                "time": path.stat().st_mtime,
            }
            for path in files[:MOST_DATA_FILES]
        ]
        return sorted(entries, key=operator.itemgetter("time"), reverse=True)

    def _is_data(self, path: Path) -> bool:
        is_shown = not path.name.startswith(".") and is_encodable(str(path))  # Other names fit into no address.
        return is_shown and path.suffix.lower() in DATA_SUFFIXES and path.is_file() and _is_inside(self.data_dir, path)


def checked_name(name: str) -> str:
    """A run's name as it came in, if it is one.

    Raises:
        Outside: it is not.
    """
    if problem := name_problem(name):
        raise Outside(say("{name!r} {problem}", name=shown_name(name), problem=problem))
    return name


def is_run_name(name: str) -> bool:
    """Whether the page can open a run of this name; the terminal may have made others."""
    return name_problem(name) is None


def inside(folder: Path, relative: str) -> Path:
    """A path below a folder, links followed.

    Raises:
        Outside: it lies elsewhere.
    """
    path = folder / relative
    if not relative or "\\" in relative or ".." in Path(relative).parts or not _is_inside(folder, path):
        raise Outside(say("{relative!r} is not a path inside {folder}", relative=relative[:80], folder=folder))
    return path


def _is_inside(folder: Path, path: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # A loop of links, or a zero byte.
        return False


class Curve:
    """One quantity in buckets: sums, counts, lowest, highest, and how often it was no number."""

    def __init__(self) -> None:
        self.sums = array("d", [0.0]) * POINTS
        self.lows = array("d", [math.inf]) * POINTS
        self.highs = array("d", [-math.inf]) * POINTS
        self.counts = array("L", [0]) * POINTS
        self.missing = array("L", [0]) * POINTS

    def add(self, bucket: int, value: float | None) -> None:
        """Take a value into a bucket; None is one that was not finite."""
        if value is None:
            self.missing[bucket] += 1
            return
        self.sums[bucket] += value
        self.counts[bucket] += 1
        self.lows[bucket] = min(self.lows[bucket], value)
        self.highs[bucket] = max(self.highs[bucket], value)

    def halve(self) -> None:
        """Let every two buckets be one."""
        for values, merge, empty in (
            (self.sums, operator.add, 0.0),
            (self.lows, min, math.inf),
            (self.highs, max, -math.inf),
            (self.counts, operator.add, 0),
            (self.missing, operator.add, 0),
        ):
            merged = list(map(merge, values[::2], values[1::2]))
            values[:] = array(values.typecode, merged + [empty] * (POINTS - len(merged)))

    def drawn(self, buckets: range) -> dict[str, list[float | None]]:
        """Mean, lowest and highest of each bucket, with as many digits as a picture shows; None where there is none."""
        means = (self.sums[k] / max(1, self.counts[k]) for k in buckets)
        columns = {"mean": means, "low": (self.lows[k] for k in buckets), "high": (self.highs[k] for k in buckets)}
        return {
            name: [float(f"{value:.6g}") if self.counts[k] else None for k, value in zip(buckets, values, strict=True)]
            for name, values in columns.items()
        }


class Grid:
    """All quantities of a run over its steps, in at most `POINTS` buckets of one width.

    Where a step falls behind the last bucket, every two become one and the width doubles. Of each bucket the lowest,
    the highest and the mean value are kept, so that no spike is lost, and how many values were no number.

    Args:
        first: the step with which the first bucket begins.
    Memory: 20 KB for each quantity, of which there are `MOST_CURVES` at most, whatever the length of the run.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.width = 1
        self.version = 0  # A page that has drawn another version draws all of this one.
        self.curves = {name: Curve() for name in CURVES}
        self.times = array("d")  # of each bucket's first step, in seconds since the run began

    @property
    def size(self) -> int:
        """Buckets begun so far."""
        return len(self.times)

    def add(self, step: int, seconds: float, values: dict[str, float | None]) -> None:
        """Take the values of a step.

        Args:
            seconds: since the run began. values: by the names of `CURVES`, or of a metric.
        """
        while (step - self.first) // self.width >= POINTS:
            for curve in self.curves.values():
                curve.halve()
            self.times = self.times[::2]
            self.width *= 2
            self.version += 1
        bucket = (step - self.first) // self.width
        self.times.extend([seconds] * (bucket + 1 - self.size))
        for name, value in values.items():
            if name not in self.curves:
                if len(self.curves) == MOST_CURVES:
                    continue
                self.curves[name] = Curve()
                self.version += 1
            self.curves[name].add(bucket, value)

    def drawn(self, first: int = 0) -> dict[str, object]:
        """What a page draws: x by steps and by time, and every quantity, from the bucket `first` on."""
        buckets = range(first, self.size)
        steps = [self.first + k * self.width for k in buckets]
        return {
            "version": self.version,
            "width": self.width,
            "first": first,
            "steps": steps,
            "seconds": [round(self.times[k], 2) for k in buckets],
            "breaks": [k for k in self._breaks() if k >= first],
            "not_a_number": [
                step
                for k, step in zip(buckets, steps, strict=True)
                if self.curves["loss"].missing[k] + self.curves["eval_loss"].missing[k]
            ],
            "series": {name: curve.drawn(buckets) for name, curve in self.curves.items()},
        }

    def _breaks(self) -> list[int]:
        """The buckets in front of which the run stood still."""
        gaps = list(map(operator.sub, self.times[1:], self.times))
        longest = max(BREAK_SECONDS, BREAK_FACTOR * statistics.median(gaps or [0.0]))
        return [k for k, gap in enumerate(gaps, start=1) if gap > longest]


class History:
    """The events of one run. Safe to read from several threads.

    Args:
        path: of its metrics.jsonl, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.lock = threading.RLock()  # Held while it changes; readers hold it for what they read.
        self._begin()

    def _begin(self) -> None:
        self.generation += 1
        self.drawn_events = 0
        self._reader = EventReader(self.path)
        self.grid = Grid()
        self._seconds = 0.0  # since the first step
        self._started = math.nan  # when that was
        self._index = [(0, 0, 0.0)]  # steps, where the file goes on behind them, and their seconds
        self.latest = LatestEvents()
        self.phase_peaks: dict[str, int] = {}
        self.cleanups: deque[list[int]] = deque(maxlen=MARKS)
        self.saves: deque[int] = deque(maxlen=MARKS)
        self.notes: deque[dict[str, Any]] = deque(maxlen=NOTES)
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)

    def settings(self) -> Record:
        """The settings of the run's last start."""
        settings = self.latest["start"].get("settings")
        return settings if isinstance(settings, dict) else {}

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

    def _take(self, event: Record) -> None:
        step = event.get("step", 0)
        if not 0 <= step < MOST_STEPS:
            return
        values = values_of(event)
        match event["event"]:
            case "step":
                self._seconds = self._seconds_at(event, self._seconds)
                self._note_peak("train", values["memory"])
                if step >= self._index[-1][0] + INDEX_STEPS:
                    self._index.append((step, self._reader.offset, self._seconds))
            case "memory":
                self._note_peak(str(event["phase"])[:40], values["memory"])
            case "cleanup" if event["kind"] == "full":
                self.cleanups.append([step, int(event["freed_bytes"])])
            case "checkpoint":
                self.saves.append(step)
            case "recovery":
                self.notes.append({"step": step, "text": str(event.get("report", ""))[:LONGEST_NOTE]})
            case "sample":
                texts = {name: str(event.get(name, ""))[:LONGEST_SAMPLE] for name in ("prompt", "answer", "reference")}
                self.samples.append({"step": step, **texts})
            case "start" | "plan" | "end":
                self.latest.add(event)
        if values:
            self.grid.add(step, self._seconds, values)
            self.drawn_events += 1

    def _note_peak(self, phase: str, memory: float | None) -> None:
        if memory and (phase in self.phase_peaks or len(self.phase_peaks) < MOST_PHASES):
            self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), int(memory))

    def _seconds_at(self, event: Record, before: float) -> float:
        """When a step was done, counted from the first one; by the steps' own times in files that tell no clock.

        Args:
            before: of the step before.
        """
        seconds = before + float(event.get("seconds") or 0.0)
        clock = number_of(event.get("time"))
        if clock is None:
            return seconds
        if math.isnan(self._started):
            self._started = clock - seconds
        return max(seconds, clock - self._started)

    def window(self, first: int, last: int) -> dict[str, object]:
        """The steps from `first` to `last` alone, on a finer grid: what a page draws when it is zoomed."""
        with self.lock:
            _, offset, seconds = next(entry for entry in reversed(self._index) if entry[0] <= max(0, first - 1))
        grid = Grid(first)
        for event in EventReader(self.path, offset).events():
            with suppress(*ODD):
                values = values_of(event)
                if values and last < event["step"] < MOST_STEPS:
                    break
                if event["event"] == "step":
                    seconds = self._seconds_at(event, seconds)
                if values and first <= event["step"] <= last:
                    grid.add(event["step"], seconds, values)
        return grid.drawn()


def values_of(event: Record) -> dict[str, float | None]:
    """What the charts show of an event, by the names of their curves; None for what is no number. Most kinds are not
    drawn.

    Raises:
        one of ODD: no run has written it.
    """
    match event["event"]:
        case "step":
            return {
                "loss": number_of(event["loss"]),
                "learning_rate": number_of(event.get("learning_rate")),
                "speed": number_of(event.get("tokens_per_second")),
                "memory": number_of(event.get("memory_bytes")),
            }
        case "eval":
            metrics = {f"eval_{name}": number_of(value) for name, value in event.items() if name not in COUNTS}
            return {"eval_loss": None, **{name: value for name, value in metrics.items() if value is not None}}
        case "memory":
            return {"memory": max(int(event["anon_bytes"]), int(event.get("device_bytes") or 0))}
    return {}
