"""A hundred thousand steps drawn with five hundred points, in buckets that grow as the run does.

A grid cuts the steps into at most `POINTS` buckets of one width; where a step falls behind the last bucket, every two
become one and the width doubles. Of each bucket the lowest, the highest and the mean value are kept, so that no spike is
lost, and how many values were no number. What is held never grows with the run: 20 KB for each quantity, of which there are
`MOST_NAMES` at most.
"""

from __future__ import annotations

import math
from array import array
from collections import deque

POINTS = 500
NAMES = ("loss", "eval_loss", "learning_rate", "speed", "memory")
MOST_NAMES = 48  # of series: those above and the metrics of evaluations
PAUSES = 200
BREAK_SECONDS, BREAK_FACTOR = 60.0, 20.0  # a pause this long, and this many times the usual one, parts a line in time


class Series:
    """One quantity on a grid: sums, counts, lowest, highest, and how often it was no number."""

    __slots__ = ("counts", "highs", "lows", "missing", "sums")

    def __init__(self) -> None:
        self.sums, self.lows, self.highs = array("d"), array("d"), array("d")
        self.counts, self.missing = array("L"), array("L")

    def add(self, place: int, value: float | None) -> None:
        """Take a value into a bucket; None is one that was not finite."""
        while len(self.counts) <= place:
            self.sums.append(0.0)
            self.lows.append(math.inf)
            self.highs.append(-math.inf)
            self.counts.append(0)
            self.missing.append(0)
        if value is None:
            self.missing[place] += 1
            return
        self.sums[place] += value
        self.counts[place] += 1
        if value < self.lows[place]:
            self.lows[place] = value
        if value > self.highs[place]:
            self.highs[place] = value

    def halve(self) -> None:
        """Let every two buckets be one."""
        for name, join in (("sums", sum), ("lows", min), ("highs", max), ("counts", sum), ("missing", sum)):
            values = getattr(self, name)
            pairs = (values[place : place + 2] for place in range(0, len(values), 2))
            setattr(self, name, array(values.typecode, map(join, pairs)))

    def drawn(self, first: int, size: int) -> dict[str, list[float | None]]:
        """Mean, lowest and highest of the buckets from `first` up to `size`; None where there is none."""
        found: dict[str, list[float | None]] = {"mean": [], "low": [], "high": []}
        for place in range(first, size):
            count = self.counts[place] if place < len(self.counts) else 0
            values = (self.sums[place] / count, self.lows[place], self.highs[place]) if count else (None, None, None)
            for points, value in zip(found.values(), values, strict=True):
                points.append(None if value is None else float(f"{value:.6g}"))  # more than a picture shows
        return found


class Grid:
    """All quantities of a run over its steps.

    Args:
        first: the step with which the first bucket begins. width: steps of a bucket at the beginning.
    """

    def __init__(self, first: int = 0, width: int = 1) -> None:
        self.first, self.width, self.version = first, width, 0
        self.series = {name: Series() for name in NAMES}
        self.times = array("d")  # of a bucket's first step
        self._pauses: deque[int] = deque(maxlen=PAUSES)  # steps that came long after the one before
        self._last, self._usual = math.nan, math.nan

    @property
    def size(self) -> int:
        """Buckets begun so far."""
        return len(self.times)

    def time_of(self, step: int) -> float:
        """Seconds since the run began, about: between the first steps of its bucket and of the next."""
        place, inside = divmod(max(0, step - self.first), self.width)
        if place >= self.size:
            return self.times[-1] if self.size else 0.0
        begin = self.times[place]
        end = self.times[place + 1] if place + 1 < self.size else self._last
        return begin + (end - begin) * inside / self.width if end > begin else begin

    def add(self, step: int, seconds: float, values: dict[str, float | None]) -> None:
        """Take what was told of one step.

        Args:
            step: at least `first`. seconds: since the run began. values: by the names of `NAMES`, or of a metric.
        """
        place = (step - self.first) // self.width
        while place >= POINTS:
            for series in self.series.values():
                series.halve()
            self.times = self.times[::2]
            self.width *= 2
            self.version += 1
            place = (step - self.first) // self.width
        while len(self.times) <= place:
            self.times.append(seconds)
        self._watch_pause(step, seconds)
        for name, value in values.items():
            if name not in self.series and len(self.series) < MOST_NAMES:
                self.series[name] = Series()
                self.version += 1  # who has drawn the others has nothing of this one
            if name in self.series:
                self.series[name].add(place, value)

    def drawn(self, first: int = 0) -> dict[str, object]:
        """What a page draws: x by steps and by time, and every quantity, from the bucket `first` on."""
        places = range(first, self.size)
        # buckets in front of which the run stood still; where it did within one, the next
        breaks = {-(-(step - self.first) // self.width) for step in self._pauses}
        lost = [
            self.first + k * self.width
            for k in places
            if any(k < len(series.missing) and series.missing[k] for series in self.series.values())
        ]
        return {
            "version": self.version, "width": self.width, "first": first,
            "steps": [self.first + k * self.width for k in places],
            "seconds": [round(self.times[k], 2) for k in places],
            "breaks": sorted(place for place in breaks if max(1, first) <= place < self.size), "not_a_number": lost,
            "series": {name: series.drawn(first, self.size) for name, series in self.series.items()},
        }  # fmt: skip

    def _watch_pause(self, step: int, seconds: float) -> None:
        gap = seconds - self._last
        self._last = seconds
        if math.isnan(self._usual):
            self._usual = gap if gap > 0 else math.nan
        elif gap > max(BREAK_SECONDS, BREAK_FACTOR * self._usual):
            self._pauses.append(step)
        elif gap > 0:
            self._usual = 0.9 * self._usual + 0.1 * gap
