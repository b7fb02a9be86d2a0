"""How good a ranking is: MRR, nDCG and recall, from how relevant its documents are, best ranked first.

A document is relevant above 0; nDCG weighs degrees of relevance by their number, as trec_eval does. What is known is
relative to the documents that were ranked: a relevant one that is not among them is not missed.
Source: Järvelin & Kekäläinen 2002, "Cumulated gain-based evaluation of IR techniques" (ACM TOIS 20).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

Relevance = Sequence[float]  # Of each document of a ranking, best ranked first.


def reciprocal_rank(relevance: Relevance) -> float:
    """1 / rank of the first relevant document; 0 where there is none."""
    return next((1 / rank for rank, grade in enumerate(relevance, 1) if grade > 0), 0.0)


def ndcg(relevance: Relevance, depth: int) -> float:
    """The discounted gain of the first `depth` documents, as a share of that of the best order; 0 where no document is
    relevant.
    """
    best = _discounted_gain(sorted(relevance, reverse=True), depth)
    return _discounted_gain(relevance, depth) / best if best else 0.0


def _discounted_gain(relevance: Relevance, depth: int) -> float:
    return sum(grade / math.log2(rank + 1) for rank, grade in enumerate(relevance[:depth], 1))


def recall(relevance: Relevance, depth: int) -> float:
    """The share of the relevant documents that are among the first `depth`; 0 where no document is relevant."""
    relevant = sum(grade > 0 for grade in relevance)
    return sum(grade > 0 for grade in relevance[:depth]) / relevant if relevant else 0.0


METRICS: dict[str, Callable[[Relevance], float]] = {
    "MRR": reciprocal_rank,
    "nDCG@10": partial(ndcg, depth=10),
    "recall@1": partial(recall, depth=1),
    "recall@5": partial(recall, depth=5),
    "recall@10": partial(recall, depth=10),
}


@dataclass
class RankingScores:
    """The means of all metrics over queries, added one by one; those without a relevant document do not count.

    Args:
        queries: that count. without_relevant: that do not.
    """

    queries: int = 0
    without_relevant: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(METRICS, 0.0))

    def add(self, relevance: Relevance) -> None:
        """Count the ranking of one query."""
        if not any(grade > 0 for grade in relevance):
            self.without_relevant += 1
            return
        self.queries += 1
        for name, metric in METRICS.items():
            self.sums[name] += metric(relevance)

    def means(self) -> dict[str, float]:
        """Metric -> its mean, 0 to 1; empty where no query counts."""
        if not self.queries:
            return {}
        return {name: total / self.queries for name, total in self.sums.items()}
