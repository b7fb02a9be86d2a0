"""Loss over held-out rows, streaming: nothing grows with the number of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from data.batches.collate import Batch
from engine.blockwise import Blockwise, Objective
from engine.step import to_micro_batch
from tasks.base import Scores
from training.evaluation.stopping import LOSS
from training.processes.group import Group


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per label token over `rows` rows of all processes; of preferences, per pair of answers.

    Args:
        tokens: what the mean is over. metrics: further figures of the objective, means as well, or scores of predicted
            labels.
        is_of_text: whether the loss is one of tokens, whose exponential is the perplexity.
    """

    loss: float
    tokens: int
    rows: int
    metrics: dict[str, float] = field(default_factory=dict)
    is_of_text: bool = True

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def shown_perplexity(self) -> str:
        """As people read it: large ones as 1.2e7."""
        if self.perplexity < 10_000:
            return f"{self.perplexity:,.2f}"
        return f"{self.perplexity:.1e}".replace("e+0", "e").replace("e+", "e")

    def figures(self) -> dict[str, float]:
        """Name -> number, as metrics.jsonl tells it."""
        perplexity = {"perplexity": self.perplexity} if self.is_of_text else {}
        return {"loss": self.loss, **perplexity, "rows": self.rows, "tokens": self.tokens, **self.metrics}


def mean_of_sets(sets: Mapping[str, Evaluation]) -> Evaluation:
    """The mean over validation sets, each of which counts alike, with the figures of each as `metrics`: `news/loss`;
    without scores that some of them lack.
    """
    results = list(sets.values())
    # Sets with rows of different kinds have different scores.
    names = [name for name in results[0].metrics if all(name in each.metrics for each in results)]
    shared = {name: sum(each.metrics[name] for each in results) / len(results) for name in names}
    own = {
        f"{name}/{figure}": value
        for name, result in sets.items()
        for figure, value in result.figures().items()
        if figure not in ("rows", "tokens")
    }
    loss = sum(result.loss for result in results) / len(results)
    tokens = sum(result.tokens for result in results)
    rows = sum(result.rows for result in results)
    return Evaluation(loss, tokens, rows, {**shared, **own}, results[0].is_of_text)


def evaluate(
    blockwise: Blockwise, batches: Iterable[Batch], group: Group, device: torch.device, scores: Scores | None = None
) -> Evaluation:
    """Run the batches forward, without dropout, and average over all processes.

    Args:
        batches: this process's share. scores: count beside the loss; None: nothing does.
    Memory: one micro-batch of evaluation.
    """
    scores = scores or Scores()
    sums = torch.zeros(3, dtype=torch.float64)  # loss, labels, rows
    blockwise.objective.clear()
    for batch in batches:
        part = to_micro_batch(batch, blockwise.model.config, device)
        sums += torch.tensor([float(blockwise.loss([part])), batch.num_labels, batch.num_rows], dtype=torch.float64)
        scores.watch(batch, blockwise.objective)
    loss, tokens, rows = group.all_reduce_sum(*sums.tolist())
    metrics = mean_metrics(blockwise.objective, tokens, group)
    blockwise.objective.clear()
    scores.gather(group)
    metrics |= scores.result()
    # Scores that have seen all rows may know a loss that is more than a mean over batches.
    mean = metrics.pop(LOSS, loss / max(tokens, 1.0))
    return Evaluation(mean, int(tokens), int(rows), metrics, blockwise.model.config.is_text)


def mean_metrics(objective: Objective, count: float, group: Group) -> dict[str, float]:
    """The objective's figures since it was cleared, summed over all processes, over `count`; {} where it has none."""
    figures = objective.metrics
    if not figures:
        return {}
    sums = group.all_reduce_sum(*figures.values())
    return {name: total / max(count, 1.0) for name, total in zip(figures, sums, strict=True)}
