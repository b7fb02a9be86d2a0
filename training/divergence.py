"""Numbers that stop being finite: rows are left out, then the learning rate is lowered, then the run ends.

A step whose loss or gradient is inf or nan is not applied, and the batch that it read is passed over: the same step is
tried with the next one. After several in a row the weights are to blame, not the rows: the run goes back to its last
checkpoint with half the learning rate; and where that has not helped several times it ends, because settings that
differ so much from those asked for are another run. All of this is in the checkpoint's state, so that a resumed run
reads the same rows at the same rate as one that was never interrupted.
Source: passing over the batches of a spike: Chowdhery et al. 2022 (arXiv 2204.02311), section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from data.batches.loader import StepLoader

MOST_IN_A_ROW = 3  # batches that may be to blame for themselves; where as many have failed, the weights are
MOST_HALVINGS = 5  # 1/32 of the learning rate asked for


@dataclass
class Divergence:
    """What was left out so far.

    Args:
        skipped: numbers of the batches passed over, 0-based, as they were found.
        halvings: of the learning rate.
        in_a_row: batches passed over since a step as far as `failed_step` was applied.
        failed_step: the last step that failed; a run that went back after it has not got over it yet.
    """

    skipped: list[int] = field(default_factory=list)
    halvings: int = 0
    in_a_row: int = 0
    failed_step: int = 0

    @property
    def rate_factor(self) -> float:
        """What is left of the learning rate."""
        return 0.5**self.halvings

    def batch_of(self, step: int) -> int:
        """Number of the batch, 0-based, that a step, counted from 1, reads: each the next one that was not passed
        over.
        """
        batch = step - 1
        for passed in sorted(self.skipped):
            batch += passed <= batch
        return batch

    def skip(self, step: int) -> None:
        """Pass over the batch of a step that failed."""
        self.skipped.append(self.batch_of(step))
        self.in_a_row += 1
        self.failed_step = max(self.failed_step, step)

    def applied(self, step: int) -> None:
        """A step was finite and is done."""
        if step >= self.failed_step:
            self.in_a_row = 0

    def slow_down(self) -> bool:
        """Halve the learning rate; False: that was done often enough."""
        self.in_a_row = 0
        if self.halvings == MOST_HALVINGS:
            return False
        self.halvings += 1
        return True

    def rows(self, loader: StepLoader, effective_batch_size: int) -> list[int]:
        """Numbers of the training rows of the batch passed over last."""
        rows: list[int] = loader.rows_of_steps(np.array(self.skipped[-1:]), effective_batch_size)[0].tolist()
        return rows
