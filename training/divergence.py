"""What does a run do where its numbers stop being finite? It leaves rows out, then slows down, then ends.

A step whose loss or gradient is inf or nan is not applied, and the batch that it read is passed over: the same step is
tried with the next one. After several in a row the weights are to blame, not the rows: the run goes back to its last
checkpoint with half the learning rate; and where that has not helped several times it ends, because settings that differ
so much from those asked for are another run. All of this is in the checkpoint's state, so that a resumed run reads
the same rows at the same rate as one that was never interrupted.
Source: passing over the batches of a spike: Chowdhery et al. 2022 (arXiv 2204.02311), section 5.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.batches.loader import StepLoader

MOST_IN_A_ROW = 3  # batches that may be to blame for themselves
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

    @classmethod
    def restore(cls, state: Mapping[str, Any] | None) -> Divergence:
        """Continue from what `state` returned; None: a run in which everything was finite."""
        return cls(**state) if state else cls()

    def state(self) -> dict[str, Any] | None:
        """What `restore` needs, for JSON."""
        return asdict(self) if self != Divergence() else None

    @property
    def rate_factor(self) -> float:
        """What is left of the learning rate."""
        return 0.5**self.halvings

    @property
    def is_stuck(self) -> bool:
        """Whether so many batches in a row have failed that the weights are to blame."""
        return self.in_a_row >= MOST_IN_A_ROW

    def batch_of(self, step: int) -> int:
        """Number of the batch, 0-based, that a step reads: each step the next one that was not passed over.

        Args:
            step: counted from 1.
        """
        batch = step - 1
        for passed in sorted(self.skipped):
            batch += passed <= batch
        return batch

    def skip(self, step: int, seen_at: int = 0) -> None:
        """Pass over the batch of a step that failed.

        Args:
            seen_at: the step that has shown it, where that is a later one.
        """
        self.skipped.append(self.batch_of(step))
        self.in_a_row += 1
        self.failed_step = max(self.failed_step, step, seen_at)

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

    def figures(self) -> dict[str, Any]:
        """What the summary of a run says of it."""
        return {"skipped_batches": len(self.skipped), "rate_factor": self.rate_factor}


def why_hopeless(base: Path | None, compute: str) -> str:
    """The problem where a model that has not been changed computes no finite loss.

    Args:
        base: folder it was loaded from; None: it was just made. compute: dtype of the products.
    """
    what = f"the losses of {MOST_IN_A_ROW} batches in a row are inf or nan before a weight was changed"
    if compute == "float16":
        return (
            f"--mixed_precision = fp16, {what}: T5's activations have left fp16's range; allowed: no, bf16; "
            "start again with --mixed_precision=bf16"
        )
    if base is None:
        return f"--learning_rate, does not matter: {what}; check --layer_norm_epsilon and --initializer_factor"
    return f"--finetune_from = {base}, {what}: this model gives no finite numbers; start from another one"


def why_diverged(
    learning_rate: float | str, max_grad_norm: float, step: int, rate_factor: float, published: Path | None
) -> str:
    """The problem where less and less of the learning rate has not helped.

    Args:
        learning_rate, max_grad_norm: that were asked for. rate_factor: of which this was left.
        step: where it failed last. published: folder of the last good model, if any.
    """
    others = "a longer --warmup_steps" + ("" if max_grad_norm else ", or --max_grad_norm=1")
    slower = f", also with {rate_factor:g} of it" if rate_factor < 1.0 else ""
    ending = f"the model of the last good checkpoint is in {published}" if published else "no model is published"
    return (
        f"--learning_rate = {learning_rate}, the run diverges at step {step}: its numbers become inf or nan{slower}; "
        f"take a smaller one or auto, {others}; {ending}"
    )
