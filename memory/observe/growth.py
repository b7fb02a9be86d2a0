"""Does what a run holds grow from step to step? Noticed within the first steps, long before it meets the budget.

A plan may be wrong where it was not calibrated: a library keeps something for each new shape, a heap breaks into pieces.
After each step a run holds the same, give or take what cleaning, ragged rows and the samples of a monitor make of it. So a
stretch of steps is cut into three, and growth is what both later thirds show: their mean is higher than that of the third
before by more than the scatter explains, their least is higher too, and the peak of the run has risen with them. Steep growth
shows in a short stretch, slow growth within noise in a longer one. What at its pace reaches the budget within the next steps
is to be answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

WINDOW = 8  # steps of the shortest third
TIMES = (1, 2, 4, 8)  # windows of a third
LEAST_SHARE = 0.002  # of the budget from third to third: less is noise
STANDARD_ERRORS = 3.0  # from third to third, twice in a row: by chance less than once in a million times
PLAIN_SHARE = (
    0.05  # of the budget in a stretch: so much is growth though an early peak, of loading or evaluating, hides it
)
FORESIGHT = 200  # steps


class Growth:
    """Watches what a run holds after its steps and its peak so far, as shares of the budget."""

    def __init__(self) -> None:
        longest = 3 * WINDOW * TIMES[-1]
        self._held: deque[float] = deque(maxlen=longest)
        self._peaks: deque[float] = deque(maxlen=longest)
        self._steps = 0

    def after_step(self, held: float, peak: float) -> float:
        """Take in what is held after a step.

        Args:
            held, peak: now, and the most so far; shares of the budget.
        Returns:
            growth a step, as a share of the budget: where a window has just ended and a stretch before it grew, else 0.
        """
        self._held.append(held)
        self._peaks.append(peak)
        self._steps += 1
        if self._steps % WINDOW:
            return 0.0
        return max(self._growth_over(times * WINDOW) for times in TIMES)

    def _growth_over(self, third: int) -> float:
        """Growth a step over the last three thirds of so many steps; 0 where there is none, or were not so many."""
        if len(self._held) < 3 * third:
            return 0.0
        held = list(self._held)[-3 * third :]
        thirds = [held[start : start + third] for start in range(0, 3 * third, third)]
        means, least = [sum(part) / third for part in thirds], [min(part) for part in thirds]
        rises = means[1] - means[0], means[2] - means[1]
        noise = STANDARD_ERRORS * _scatter(thirds) * (2.0 / third) ** 0.5
        if min(rises) <= max(LEAST_SHARE, noise):
            return 0.0
        if any(2 * (later - before) < rise for before, later, rise in zip(least, least[1:], rises, strict=False)):
            return 0.0  # one step up, not growth
        rise, peaks = sum(rises), self._peaks[-1] - self._peaks[-3 * third]
        return min(rises) / third if rise > PLAIN_SHARE or 2 * peaks > rise else 0.0

    def steps_left(self, growth: float, peak: float) -> int | None:
        """Steps until the budget is reached at this pace; None: not within sight.

        Args:
            growth: a step, from `after_step`. peak: the most that was held so far, as a share of the budget.
        """
        if growth <= 0.0:
            return None
        steps = max(0.0, 1.0 - peak) / growth
        return int(steps) if steps <= FORESIGHT else None

    def forget(self) -> None:
        """Begin anew: what is held has just been changed on purpose."""
        self._held.clear()
        self._peaks.clear()
        self._steps = 0


def _scatter(parts: Sequence[Sequence[float]]) -> float:
    """Standard deviation of values around the straight line of their own part."""
    squares, free = 0.0, 0
    for part in parts:
        middle, mean = (len(part) - 1) / 2, sum(part) / len(part)
        around = [(step - middle, value - mean) for step, value in enumerate(part)]
        spread = sum(step**2 for step, _ in around)
        slope = sum(step * value for step, value in around) / spread if spread else 0.0
        squares += sum((value - slope * step) ** 2 for step, value in around)
        free += max(0, len(part) - 2)
    return float((squares / free) ** 0.5) if free else 0.0
