"""How are a hundred thousand steps drawn with five hundred points? In buckets that grow as the run does.

A grid cuts the steps into at most `POINTS` buckets of one width; where a step falls behind the last bucket, every two
become one and the width doubles. Of each bucket the lowest, the highest and the mean value are kept, so that no spike is
lost, and how many values were no number. What is held never grows with the run.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

POINTS = 500
NAMES = ("loss", "eval_loss", "learning_rate", "speed", "memory")
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
        old, size = {name: getattr(self, name) for name in self.__slots__}, len(self.counts)
        join: dict[str, Callable[[Any, Any], Any]] = {"lows": min, "highs": max}
        for name, values in old.items():
            both = join.get(name, operator.add)
            joined = (both(values[k], values[k + 1]) if k + 1 < size else values[k] for k in range(0, size, 2))
            setattr(self, name, array(values.typecode, joined))

    def drawn(self, first: int, size: int) -> dict[str, list[float | None]]:
        """Mean, lowest and highest of the buckets from `first` up to `size`; None where there is none."""
        held = len(self.counts)
        places = [place if place < held and self.counts[place] else -1 for place in range(first, size)]
        return {
            "mean": [None if k < 0 else _short(self.sums[k] / self.counts[k]) for k in places],
            "low": [None if k < 0 else _short(self.lows[k]) for k in places],
            "high": [None if k < 0 else _short(self.highs[k]) for k in places],
        }


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
            step: at least `first`. seconds: since the run began. values: by the names of `NAMES`.
        """
        place = (step - self.first) // self.width
        while place >= POINTS:
            self._halve()
            place = (step - self.first) // self.width
        while len(self.times) <= place:
            self.times.append(seconds)
        self._watch_pause(step, seconds)
        for name, value in values.items():
            self.series[name].add(place, value)

    def _halve(self) -> None:
        for series in self.series.values():
            series.halve()
        self.times = self.times[::2]
        self.width *= 2
        self.version += 1

    def drawn(self, first: int = 0) -> dict[str, object]:
        """What a page draws: x by steps and by time, and every quantity, from the bucket `first` on."""
        places = range(first, self.size)
        lost = [
            self.first + k * self.width
            for k in places
            if any(k < len(series.missing) and series.missing[k] for series in self.series.values())
        ]
        return {
            "version": self.version, "width": self.width, "first": first,
            "steps": [self.first + k * self.width for k in places],
            "seconds": [round(self.times[k], 2) for k in places],
            "breaks": self._breaks(first), "not_a_number": lost,
            **{name: series.drawn(first, self.size) for name, series in self.series.items()},
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

    def _breaks(self, first: int) -> list[int]:
        """Buckets in front of which the run stood still, as it does between a stop and going on."""
        places = {-(-(step - self.first) // self.width) for step in self._pauses}  # in the middle of one: behind it
        return sorted(place for place in places if max(1, first) <= place < self.size)


def _short(value: float) -> float:
    """Six digits are more than a picture shows."""
    return float(f"{value:.6g}")
