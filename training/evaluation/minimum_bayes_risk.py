"""Minimum Bayes risk: of several candidates that answer which is, on average, most similar to all of them.

Similarity is the mean of sacreBLEU's scores of each of two candidates with the other as its reference, since chrF, which weighs
recall twice, would choose answers that are too long. The n-grams that two candidates share are counted for all pairs at once:
with a column for each n-gram and a row for each candidate, the matrix of "has it at least c times", times its own transpose,
summed over c.

Source: Kumar and Byrne 2004; Eikema and Aziz 2020 (arXiv 2005.10283); chrF: Popović 2015; BLEU of sentences as sacreBLEU smooths it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096  # n-grams that are counted at a time

Counts = NDArray[np.float32]


def most_agreed(weights: Mapping[str, float], by: str) -> str:
    """The candidate with the highest mean similarity, chrf, chrf++ or bleu, to all of them by their weights; the first of equal ones."""
    texts = list(weights)
    if len(texts) == 1:
        return texts[0]
    found = similarities(texts, by)
    return texts[((found + found.T) @ list(weights.values())).argmax()]


def similarities(texts: Sequence[str], by: str) -> NDArray[np.float64]:
    """(N, N) scores of each text with each other one as its reference; 100 of a text with itself.

    Memory: some 100 bytes a character of all texts, and 8 MiB for 256 of them.
    """
    from sacrebleu.metrics import BLEU, CHRF

    count = len(texts)
    metric: Any
    if by == "bleu":
        metric = BLEU(effective_order=True)
        words = [metric._preprocess_segment(text).split() for text in texts]
        shared = list(_shared(words, metric.max_ngram_order))
    else:
        metric = CHRF(word_order=2 if by == "chrf++" else 0)
        words = [metric._remove_punctuation(text) for text in texts]
        letters = ["".join(text.split()) for text in texts]
        shared = [*_shared(letters, metric.char_order), *_shared(words, metric.word_order)]
    totals = np.stack([total for total, _ in shared]).astype(int)  # (orders, N)
    matches = np.stack([common for _, common in shared]).astype(int)  # (orders, N, N)
    found = np.full((count, count), 100.0)
    for one in range(count):
        for other in range(count):
            if one == other:
                continue
            common, own, theirs = matches[:, one, other], totals[:, one], totals[:, other]
            if by == "bleu":
                stats = [len(words[one]), len(words[other]), *common.tolist(), *own.tolist()]
            else:
                stats = np.stack([np.where(theirs > 0, own, 0), theirs, common], 1).ravel().tolist()
            found[one, other] = metric._compute_score_from_stats(stats).score
    return found


def _shared(sequences: Sequence[Sequence[str]], order: int) -> Iterator[tuple[Counts, Counts]]:
    """For n up to `order`: the n-grams that each sequence has (N,), and those that each pair shares (N, N)."""
    numbers = dict[str, int]()
    flat = np.array([numbers.setdefault(one, len(numbers)) for sequence in sequences for one in sequence], np.int64)
    lengths = np.array([len(sequence) for sequence in sequences])
    owners = np.repeat(np.arange(len(sequences)), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(flat))  # to the end of its sequence
    starts, grams = np.arange(len(flat)), flat
    for n in range(1, order + 1):
        fits = left[starts] >= n
        starts, grams = starts[fits], grams[fits]
        if n > 1:  # an n-gram is the one before it with one more
            grams = np.unique(grams * len(numbers) + flat[starts + n - 1], return_inverse=True)[1]
        yield np.maximum(lengths - n + 1, 0).astype(np.float32), _matches(grams, owners[starts], len(sequences))


def _matches(grams: NDArray[np.int64], owners: NDArray[np.int64], count: int) -> Counts:
    keys, times = np.unique(grams * count + owners, return_counts=True)
    columns, rows = keys // count, keys % count
    is_shared = np.bincount(columns)[columns] > 1 if len(columns) else np.zeros(0, bool)
    rows, times = rows[is_shared], times[is_shared]
    columns = np.unique(columns[is_shared], return_inverse=True)[1]
    found: Counts = np.zeros((count, count), np.float32)
    for first in range(0, columns.max(initial=-1) + 1, BLOCK):
        part = slice(*np.searchsorted(columns, (first, first + BLOCK)))
        for least in range(1, times[part].max() + 1):
            is_there = times[part] >= least
            table: Counts = np.zeros((count, min(BLOCK, columns[-1] + 1 - first)), np.float32)
            table[rows[part][is_there], columns[part][is_there] - first] = 1
            found += table @ table.T
    return found
