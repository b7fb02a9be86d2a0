"""The candidate that agrees most with the others, against a loop over all pairs with sacreBLEU."""

from __future__ import annotations

import random

import numpy as np
import pytest

from training.evaluation import minimum_bayes_risk
from training.evaluation.minimum_bayes_risk import most_agreed, similarities


def by_sacrebleu(texts: list[str], by: str) -> np.ndarray:
    from sacrebleu.metrics import BLEU, CHRF

    metric = BLEU(effective_order=True) if by == "bleu" else CHRF(word_order=2 if by == "chrf++" else 0)
    return np.array([
        [0.0 if one == other else metric.sentence_score(texts[one], [texts[other]]).score for other in range(len(texts))]
        for one in range(len(texts))
    ])  # fmt: skip


def drawn(count: int) -> list[str]:
    draw = random.Random(count)
    words = ["the", "king", "of", "Aššur,", "(son", "of)", "took", "1/2", "mina", "silver.", "王", "的", "aaaa"]
    base = [draw.choice(words) for _ in range(12)]
    texts = [" ".join(draw.choice(words) if draw.random() < 0.3 else word for word in base) for _ in range(count)]
    return [*texts, texts[0], "", "a", "  two  spaces "]


@pytest.mark.parametrize("by", ["chrf", "chrf++", "bleu"])
def test_similarities_are_those_of_sacrebleu(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = drawn(12)
    expected = by_sacrebleu(texts, by)
    np.testing.assert_allclose(similarities(texts, by), expected, rtol=1e-9, atol=1e-9)
    assert most_agreed(texts, by) == (expected + expected.T).sum(1).argmax()
    monkeypatch.setattr(minimum_bayes_risk, "BLOCK", 5)
    np.testing.assert_allclose(similarities(texts, by), expected, rtol=1e-9, atol=1e-9)


def test_the_more_frequent_wins_and_of_equal_ones_the_first() -> None:
    assert most_agreed(["b", "a", "a"], "chrf") == 1
    assert most_agreed(["b", "a"], "chrf") == most_agreed(["b"], "chrf") == 0


def test_a_candidate_does_not_win_by_its_length() -> None:
    candidates = ["he built", "he built the wall", "he built the wall of the town and the gate"]
    assert most_agreed(candidates, "chrf") == most_agreed(candidates, "chrf++") == 1
    assert similarities(candidates, "chrf").sum(1).argmax() == 2  # as chrF with the others as references would have it
