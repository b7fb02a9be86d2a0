"""Does what a run holds grow from step to step? Noticed within the first steps, long before it meets the budget.

A plan may be wrong where it was not calibrated: a library keeps something for each new shape, a heap breaks into pieces.
After each step a run holds the same; so windows of steps are compared, each by the least that was held in it, because
cleaning and the samples of a monitor come and go. What has grown in two windows in a row, and at that pace reaches the
budget within the next steps, is to be answered.
"""

from __future__ import annotations

from collections import deque

WINDOW = 8  # steps
LEAST_SHARE = 0.002  # of the budget in a window: less is noise
FORESIGHT = 200  # steps


class Growth:
    """Watches what a run holds after its steps, as shares of the budget."""

    def __init__(self) -> None:
        self._window: list[float] = []
        self._least: deque[float] = deque(maxlen=3)  # of the last windows

    def after_step(self, held: float) -> float:
        """Take in what is held after a step.

        Args:
            held: share of the budget.
        Returns:
            growth a step, as a share of the budget: where a window has just ended and the two before it grew as well,
            else 0.
        """
        self._window.append(held)
        if len(self._window) < WINDOW:
            return 0.0
        self._least.append(min(self._window))
        self._window.clear()
        if len(self._least) < 3:
            return 0.0
        first, second, third = self._least
        slowest = min(second - first, third - second)
        return slowest / WINDOW if slowest > LEAST_SHARE else 0.0

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
        self._window.clear()
        self._least.clear()
