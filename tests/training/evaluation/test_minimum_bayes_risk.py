"""The candidate that agrees most with the others, against a loop over all pairs with sacreBLEU."""

from __future__ import annotations

import random

import numpy as np
import pytest

from model.decoding.beam_search import ScoredAnswer
from training.evaluation import minimum_bayes_risk
from training.evaluation.answers import weighted
from training.evaluation.minimum_bayes_risk import most_agreed, similarities


def by_sacrebleu(texts: list[str], by: str) -> np.ndarray:
    from sacrebleu.metrics import BLEU, CHRF

    metric = BLEU(effective_order=True) if by == "bleu" else CHRF(word_order=2 if by == "chrf++" else 0)
    return np.array([
        [100.0 if one == other else metric.sentence_score(texts[one], [texts[other]]).score for other in range(len(texts))]
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
    weights = {text: 1.0 + place for place, text in enumerate(dict.fromkeys(texts))}
    distinct = by_sacrebleu(list(weights), by)
    assert most_agreed(weights, by) == list(weights)[((distinct + distinct.T) @ list(weights.values())).argmax()]
    monkeypatch.setattr(minimum_bayes_risk, "BLOCK", 5)
    np.testing.assert_allclose(similarities(texts, by), expected, rtol=1e-9, atol=1e-9)


def test_the_heavier_wins_and_of_equal_ones_the_first() -> None:
    assert most_agreed({"b": 1.0, "a": 2.0}, "chrf") == "a"
    assert most_agreed({"b": 1.0, "a": 1.0}, "chrf") == most_agreed({"b": 0.0}, "chrf") == "b"


def test_a_candidate_does_not_win_by_its_length() -> None:
    candidates = ["he built", "he built the wall", "he built the wall of the town and the gate"]
    weights = dict.fromkeys(candidates, 1.0)
    assert most_agreed(weights, "chrf") == most_agreed(weights, "chrf++") == candidates[1]
    assert similarities(candidates, "chrf").sum(1).argmax() == 2  # as chrF with the others as references would have it


def test_an_unlikely_answer_of_a_search_weighs_little() -> None:
    best = [ScoredAnswer([1], np.log(0.6)), ScoredAnswer([2], np.log(0.2))]
    assert [tokens for tokens, _ in weighted(best, [[1], [3], [2], [3]])] == [[1], [2], [3], [3]]
    assert [weight for _, weight in weighted(best, [[1], [3], [2], [3]])] == pytest.approx([0.45, 0.15, 0.2, 0.2])
    assert [weight for _, weight in weighted(best, [])] == pytest.approx([0.75, 0.25])
    assert [weight for _, weight in weighted(best, [[3]])] == pytest.approx([0.375, 0.125, 0.5])
