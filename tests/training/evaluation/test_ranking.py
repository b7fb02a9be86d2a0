"""MRR, nDCG and recall of a ranking are those of trec_eval."""

from __future__ import annotations

import pytest

from training.evaluation.ranking import RankingScores, ndcg, recall, reciprocal_rank

# Degrees of relevance, best ranked first, and what pytrec_eval 0.5.11 says of them: recip_rank, ndcg_cut_10, recall_1,
# recall_5, recall_10. sklearn 1.9.1 has the same ndcg_score(k=10).
TREC_EVAL = [
    ([0, 0, 1], 0.333333, 0.5, 0, 1, 1),
    ([1, 0, 0], 1, 1, 1, 1, 1),
    ([0] * 11 + [1], 0.083333, 0, 0, 0, 0),
    ([3, 2, 3, 0, 1, 2], 1, 0.960808, 0.2, 0.8, 1),
    ([0, 1, 0, 2, 0, 0, 3, 0, 0, 0, 0, 1, 2], 0.5, 0.409956, 0, 0.4, 0.6),
]


@pytest.mark.parametrize(("relevance", "mrr", "gain", "at_1", "at_5", "at_10"), TREC_EVAL)
def test_scores_are_those_of_trec_eval(
    relevance: list[float], mrr: float, gain: float, at_1: float, at_5: float, at_10: float
) -> None:
    assert reciprocal_rank(relevance) == pytest.approx(mrr, abs=1e-6)
    assert ndcg(relevance, 10) == pytest.approx(gain, abs=1e-6)
    assert [recall(relevance, depth) for depth in (1, 5, 10)] == pytest.approx([at_1, at_5, at_10])


def test_queries_without_a_relevant_document_do_not_count() -> None:
    scores = RankingScores()
    assert scores.means() == {}
    for relevance in ([0, 1], [0, 0], [], [1, 0]):
        scores.add(relevance)
    assert (scores.queries, scores.without_relevant) == (2, 2)
    assert scores.means()["MRR"] == 0.75 and scores.means()["recall@1"] == 0.5
    assert reciprocal_rank([0]) == ndcg([0], 10) == recall([0], 10) == 0
