"""Scores of vectors: how well their cosines order pairs of texts by a number, and what a text finds among all others.

Numbers: Spearman's and Pearson's correlation with the cosines. Texts that belong together: the first text of each row
looks among the second and further texts of all rows, equal ones counted once; those that some row puts beside it are
relevant. Recall at 1 and 10 is the share of them that is found, MRR the mean of 1 / rank of the first that is, nDCG
with gains of 1; both look at the best 10.
Source: Järvelin & Kekäläinen 2002 (nDCG); the evaluators of sentence-transformers 6.2.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from data.batches.collate import Batch, EmbeddingBatch
from devices.sizes import COMPARED_BYTES
from engine.blockwise import Objective
from engine.nearest import QUERIES, blocks_of, nearest
from engine.objectives.embedding import EmbeddingObjective, Texts, pad_targets
from tasks.base import Processes, Scores, Watch
from tasks.label_scores import correlation, ranks

DEPTH = 10  # Ranks that are looked at.
PIECES = 4  # Of the cosines of all texts with all, pieces are held in so many forms.
COPIES = 10  # Of all vectors so many are held at the highest, for the loss and its gradient.
Rows = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64], list[NDArray[np.float32]]]


class EmbeddingScores(Scores):
    """Vectors as they come.

    Args:
        write: gets each batch and the vectors of its texts as well.
    Memory: see `held_bytes`.
    """

    def __init__(self, write: Watch | None = None) -> None:
        self._write = write
        self._rows: list[Rows] = []
        self._objective: EmbeddingObjective | None = None

    def watch(self, batch: Batch, objective: Objective) -> None:
        """See `Scores`."""
        self._objective = cast(EmbeddingObjective, objective)
        assert self._objective.vectors is not None, "the loss of the batch was formed before"
        assert isinstance(batch, EmbeddingBatch)
        vectors = self._objective.vectors.float().cpu().numpy()
        self._rows.append((vectors, batch.labels[:, 0], batch.row_texts, list(batch.targets)))
        if self._write is not None:
            self._write(batch, vectors)

    def gather(self, processes: Processes) -> None:
        """See `Scores`."""
        self._rows = list(chain.from_iterable(processes.gather(self._rows)))

    def result(self) -> dict[str, float]:
        """The loss of all rows as one batch, and the scores of the kinds of rows that there are."""
        if not self._rows or self._objective is None:
            return {}
        vectors, numbers, row_texts = (np.concatenate([rows[column] for rows in self._rows]) for column in range(3))
        targets = pad_targets([each for *_, of_rows in self._rows for each in of_rows])
        texts = Texts(*map(torch.from_numpy, (vectors, numbers, row_texts, targets)))
        result = {"loss": float(self._objective.loss_of(texts)) / len(row_texts)}
        firsts = np.cumsum(row_texts) - row_texts
        directions = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        is_graded = (row_texts > 1) & ~np.isnan(targets[:, 0])
        if is_graded.any():
            pairs = firsts[is_graded]
            cosines = np.einsum("ij,ij->i", directions[pairs], directions[pairs + 1], dtype=np.float64)
            labels = targets[is_graded, 0].astype(np.float64)
            result["spearman"] = correlation(ranks(labels), ranks(cosines))
            result["pearson"] = correlation(labels, cosines)
        belongs = (row_texts > 1) & ~is_graded
        if belongs.any():
            result |= _found(directions, numbers, firsts, row_texts, np.flatnonzero(belongs))
        return result


def _found(
    directions: NDArray[np.float32],
    numbers: NDArray[np.int64],
    firsts: NDArray[np.int64],
    row_texts: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> dict[str, float]:
    """The scores of what the first text of each of these rows finds; see `Texts` for the arrays."""
    relevant = defaultdict[int, set[int]](set)
    queries = dict[int, int]()  # Number of a text -> its index; equal texts count once.
    corpus = dict[int, int]()
    for row in rows.tolist():
        first = int(firsts[row])
        query = int(numbers[first])
        queries.setdefault(query, first)
        relevant[query].add(int(numbers[first + 1]))
        for text in range(first + 1, first + int(row_texts[row])):
            corpus.setdefault(int(numbers[text]), text)
    documents = torch.from_numpy(directions[list(corpus.values())])
    names = np.array(list(corpus))
    depth = min(DEPTH, len(names))
    discounts = 1 / np.log2(np.arange(DEPTH) + 2)
    totals = np.zeros(4)
    query_texts = np.array(list(queries.values()))
    for begin in range(0, len(query_texts), QUERIES):
        block = query_texts[begin : begin + QUERIES]
        _, best = nearest(torch.from_numpy(directions[block]), blocks_of(documents), depth)
        for query_number, ranked in zip(numbers[block].tolist(), names[best.numpy()], strict=True):
            matches = relevant[query_number]
            hits = np.array([name in matches for name in ranked.tolist()])
            ideal = discounts[: len(matches)].sum()
            first_hit = 1 / (1 + int(hits.argmax())) if hits.any() else 0.0
            totals += (hits[0] / len(matches), hits.sum() / len(matches), first_hit, hits @ discounts[:depth] / ideal)
    return dict(zip(("recall@1", "recall@10", "mrr@10", "ndcg@10"), (totals / len(query_texts)).tolist(), strict=True))


def held_bytes(texts: int, width: int) -> int:
    """What the scores and the loss of so many vectors hold at the highest."""
    return COPIES * 4 * width * texts + PIECES * COMPARED_BYTES
