"""What does an evaluation find? Figures over held-out rows, and answers to look at."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per label token over `rows` rows of all processes; of preferences, per pair of answers.

    Args:
        tokens: what the mean is over. metrics: further figures of the objective, means as well.
    """

    loss: float
    tokens: int
    rows: int
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def figures(self) -> dict[str, float]:
        """Name -> number, as metrics.jsonl tells it."""
        told = {"loss": self.loss, "perplexity": self.perplexity, "rows": self.rows, "tokens": self.tokens}
        return {**told, **self.metrics}


@dataclass(frozen=True)
class Sample:
    """One answer beside what the data says."""

    prompt: str
    answer: str
    reference: str


SHOWN_ROWS = 8


def named_rows(rows: list[int]) -> str:
    """Some row numbers in words: `row 5`, `rows 5, 9, 12 and 4 more (see metrics.jsonl)`."""
    shown = ", ".join(str(row) for row in rows[:SHOWN_ROWS])
    further = f" and {len(rows) - SHOWN_ROWS} more (see metrics.jsonl)" if len(rows) > SHOWN_ROWS else ""
    return f"row{'s' * (len(rows) > 1)} {shown}{further} of the training data"
