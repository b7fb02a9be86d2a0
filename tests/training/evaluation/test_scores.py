"""Scores of answers against the programs that define them, and against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from settings.consistency import SCORES
from settings.declared import Config
from training.evaluation.metrics import METRICS, normalised, token_f1
from training.evaluation.scores import AnswerScores, metric_names

ANSWERS = [
    "The cat sat on the mat.",
    "a dog barks, loudly",
    "",
    "It's 3.5% of GDP (2019).",
    "the river runs under the bridge",
    "我们今天去公园。",
    "水在100度沸腾 boiling",
    "same text here",
]
REFERENCES = [
    "The cat is on the mat.",
    "the dog barked loudly",
    "something",
    "It is 3.5 % of the GDP in 2019.",
    "the river ran under an old stone bridge",
    "我们昨天去了公园。",
    "水在100度时沸腾",
    "same text here",
]


def names_of(**flags: object) -> list[str]:
    config = Config().with_changes(**flags)
    return metric_names(config.metrics.metrics, config.answer.num_answers)


def test_every_score_has_its_metric() -> None:
    assert tuple(METRICS) == SCORES and metric_names("auto", 1) == list(SCORES)


def scored(names: list[str], answers: list[str] = ANSWERS, references: list[str] = REFERENCES) -> dict[str, float]:
    scores = AnswerScores(names)
    for answer, reference in zip(answers, references, strict=True):
        scores.add(answer, reference)
    assert scores.sums[-1] == len(answers)
    return scores.result()


def test_corpus_scores_are_those_of_sacrebleu() -> None:
    from sacrebleu.metrics import BLEU, CHRF

    ours = scored(["bleu", "chrf", "chrf++", "char_bleu"])
    reference_metrics = {"bleu": BLEU(), "chrf": CHRF(), "chrf++": CHRF(word_order=2), "char_bleu": BLEU(tokenize="zh")}
    for name, metric in reference_metrics.items():
        assert ours[name] == pytest.approx(metric.corpus_score(ANSWERS, [REFERENCES]).score), name
        assert 1 < ours[name] < 99


def test_of_several_right_answers_the_best_counts() -> None:
    """As SQuAD's script, sacrebleu and rouge_score define it, each on its own."""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU, CHRF

    references = [
        [right, answer + " indeed", "x"][: 1 + at % 3]
        for at, (answer, right) in enumerate(zip(ANSWERS, REFERENCES, strict=True))
    ]
    scores = AnswerScores(["exact_match", "f1", "bleu", "chrf", "rouge_l", "identical"])
    for answer, right in zip(ANSWERS, references, strict=True):
        scores.add(answer, right)
    ours = scores.result()
    streams = [[right[at] if at < len(right) else None for right in references] for at in range(3)]
    for name, metric in {"bleu": BLEU(), "chrf": CHRF()}.items():
        assert ours[name] == pytest.approx(metric.corpus_score(ANSWERS, streams).score), name
    f1 = [max(token_f1(answer, one) for one in right) for answer, right in zip(ANSWERS, references, strict=True)]
    assert ours["f1"] == pytest.approx(100 * np.mean(f1))
    english = RougeScorer(["rougeL"])
    scores = AnswerScores(["rouge_l"])
    scores.add(ANSWERS[0], references[1])
    expected = english.score_multi(references[1], ANSWERS[0])["rougeL"].fmeasure
    assert scores.result()["rouge_l"] == pytest.approx(100 * expected)
    scores = AnswerScores(["exact_match", "identical"])
    scores.add("The Cat!", ["dog", "cat"])
    scores.add("cat", ["dog", "cat"])
    assert scores.result() == {"exact_match": 100.0, "identical": 50.0}


def test_rouge_is_that_of_rouge_score() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    english = [number for number, text in enumerate(REFERENCES) if text.isascii()]
    answers, references = ([texts[number] for number in english] for texts in (ANSWERS, REFERENCES))
    answers += ["the cat sat.\nIt was on a mat\n\nand slept", "a b\nc d", ""]
    references += ["It was a mat.\nThe cat slept on it.", "c d a b", "x\ny"]
    names = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL", "rouge_lsum": "rougeLsum"}
    scorer = RougeScorer(list(names.values()))
    rows = [scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True)]
    ours = scored(list(names), answers, references)
    assert ours["rouge_lsum"] != ours["rouge_l"]
    for name, reference_metrics in names.items():
        assert ours[name] == pytest.approx(100 * np.mean([row[reference_metrics].fmeasure for row in rows])), name


@pytest.mark.parametrize(
    "answer,reference,exact,f1",
    [
        ("The Cat!", "cat", 1, 1.0),
        ("", "cat", 0, 0.0),
        ("dog dog cat", "dog cat cat", 0, 2 / 3),
        ("北京", "北京市", 0, 2 * 2 / 5),
    ],
)
def test_exact_match_and_f1(answer: str, reference: str, exact: int, f1: float) -> None:
    assert int(normalised(answer) == normalised(reference)) == exact
    assert token_f1(answer, reference) == pytest.approx(f1)
    assert scored(["exact_match", "f1"], [answer], [reference]) == pytest.approx(
        {"exact_match": 100.0 * exact, "f1": 100 * f1}
    )


def test_ranked_answers() -> None:
    """Right ones at ranks 1, 3 and 6, and nowhere."""
    names = names_of(num_answers=10, metrics="identical,mrr,recall@1,recall@5,ndcg@5,ndcg@10")
    scores = AnswerScores(names)
    for rank in (1, 3, 6, 99):
        first, *further = ["right " if number == rank else f"wrong {number}" for number in range(1, 11)]
        scores.add(first, "right", further)
    assert scores.result() == pytest.approx(
        {
            "identical": 25.0,
            "mrr": 100 * (1 + 1 / 3 + 1 / 6) / 4,
            "recall@1": 25.0,
            "recall@5": 50.0,
            "ndcg@5": 100 * (1 + 1 / 2) / 4,
            "ndcg@10": 100 * (1 + 1 / 2 + 1 / np.log2(7)) / 4,
        }
    )
    assert names_of(num_answers=7)[-5:] == ["recall@5", "recall@7", "ndcg@5", "ndcg@7", "mrr"]
