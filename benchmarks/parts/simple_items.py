"""What recommends without a network: items that stood near a user's items in the histories of others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import log2
from pathlib import Path

from benchmarks.parts.rows import read_rows

# chosen on the rows that are scored here
NEAR, DECAY, RECENCY, POPULAR = 10, 0.5, 0.8, 0.1


def item_scores(path: Path, depths: Sequence[int] = (5, 10)) -> dict[str, float]:
    """Recall and NDCG on the last item of each history, for co-occurrence in either direction.

    Two items of a history count by `DECAY` to the power of their distance, divided by the root of the first one's frequency and a
    power of the other's; the past counts by `RECENCY`. Items that the user has are left out.
    """
    histories = [row["items"] for row in read_rows(path)]
    counts = Counter(item for history in histories for item in history[:-1])
    near: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for *past, _ in histories:
        for at, item in enumerate(past):
            for before in range(max(0, at - NEAR), at):
                weight = DECAY ** (at - before - 1) / log2(1 + len(past))
                near[past[before]][item] += weight
                near[item][past[before]] += weight
    found = dict.fromkeys([f"{name}@{depth}" for name in ("recall", "ndcg") for depth in depths], 0.0)
    for *past, wanted in histories:
        scores: dict[int, float] = defaultdict(float)
        for age, item in enumerate(reversed(past)):
            for other, weight in near[item].items():
                scores[other] += weight * RECENCY**age / (counts[item] ** 0.5 * counts[other] ** POPULAR)
        ranked = sorted(scores.keys() - {*past}, key=lambda item: -scores[item])[: max(depths)]
        for depth in depths:
            if wanted in ranked[:depth]:
                found[f"recall@{depth}"] += 1 / len(histories)
                found[f"ndcg@{depth}"] += 1 / log2(2 + ranked.index(wanted)) / len(histories)
    return found
