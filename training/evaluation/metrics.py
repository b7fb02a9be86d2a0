"""How one answer is compared with the right ones: one function a metric, listed in `METRICS`.

A metric turns one row into a few numbers, numbers are added over rows and processes, and its percentages follow from
the sums.

Chinese: letters of Chinese, Japanese and Korean are tokens of their own for F1, ROUGE and `char_bleu`; other text is
split as the metric's own program does it.

Several right answers: exact match, F1 and ROUGE count the best of them, each for itself; sacrebleu takes them as its
references.

Ranked answers: a right answer is found where an answer is the same text, the first of them counts. Recall@K is whether
it is among the first K, NDCG@K is 1 / log2(rank + 1) there, MRR is 1 / rank among all.
Source: SQuAD's evaluation script (arXiv 1606.05250); sacrebleu (arXiv 1804.08771); rouge-score of google-research.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from settings.consistency import GEOMETRIC_MEAN, ROUGE

Sums = NDArray[np.float64]
LONGEST_CJK_WORD = 4  # letters

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_CJK_LETTER = re.compile(f"([{_CJK}])")
_ROUGE_TOKEN = re.compile(f"[{_CJK}]|[^\\W_{_CJK}]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class Metric:
    """One way to compare, of one score or several.

    Args:
        names: of its scores. count: the numbers of one row, of its answers, best first, and the right ones; always as
            many.
        signature: sacreBLEU's.
        scores: the percentages, one for each name, of the summed numbers, the last of which is the number of rows:
            means of rows, unless a metric says otherwise.
    """

    names: tuple[str, ...]
    count: Callable[[Sequence[str], Sequence[str]], Sequence[float]]
    scores: Callable[[Sums], Sequence[float]] = lambda sums: (100 * sums[:-1] / sums[-1]).tolist()
    signature: str = ""


def normalised(text: str) -> str:
    """SQuAD's form of an answer: lower case, without punctuation and articles, single spaces. Of any script."""
    without_marks = "".join(
        letter for letter in text.lower() if letter not in string.punctuation and unicodedata.category(letter)[0] != "P"
    )
    return " ".join(_ARTICLES.sub(" ", without_marks).split())


def token_f1(answer: str, reference: str) -> float:
    """SQuAD's F1 over the tokens of two answers, 0 to 1; both empty is 1."""
    answered = Counter(_tokens(answer))
    right = Counter(_tokens(reference))
    total = answered.total() + right.total()
    return 2 * (answered & right).total() / total if total else 1.0


def _tokens(text: str) -> list[str]:
    return _CJK_LETTER.sub(r" \1 ", normalised(text)).split()


def is_word(text: str) -> bool:
    """Whether a text is a single word: without blanks, and of Chinese, Japanese or Korean no longer than such words
    are.
    """
    return len(text.split()) <= 1 and len(_CJK_LETTER.findall(text)) <= LONGEST_CJK_WORD


def squad() -> Metric:
    """Exact match and F1, as SQuAD counts them."""

    def count(answers: Sequence[str], references: Sequence[str]) -> list[float]:
        is_exact = normalised(answers[0]) in map(normalised, references)
        return [float(is_exact), max(token_f1(answers[0], reference) for reference in references)]

    return Metric(("exact_match", "f1"), count)


def identical() -> Metric:
    """The same text, where every mark counts, as in phones, dates and numbers."""
    return Metric(("identical",), lambda answers, references: [float(answers[0].strip() in map(str.strip, references))])


def rouge() -> Metric:
    """ROUGE; for -Lsum the lines of a text are its sentences, as in rouge_score itself."""
    from rouge_score.rouge_scorer import RougeScorer

    # Words are taken as its own tokenizer takes them for English, and letters of Chinese.
    tokenizer = SimpleNamespace(tokenize=lambda text: _ROUGE_TOKEN.findall(text.lower()))
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], tokenizer=tokenizer)

    def count(answers: Sequence[str], references: Sequence[str]) -> list[float]:
        return [score.fmeasure for score in scorer.score_multi(references, answers[0]).values()]

    return Metric(ROUGE, count)


def sacrebleu(name: str, metric: str, **options: Any) -> Metric:
    """A corpus score of sacrebleu, whose n-grams are counted row by row."""
    import sacrebleu.metrics

    corpus: Any = getattr(sacrebleu.metrics, metric)(**options)
    corpus.num_refs = 1

    def count(answers: Sequence[str], references: Sequence[str]) -> Sequence[float]:
        statistics: Sequence[float] = corpus._extract_corpus_statistics([answers[0]], [[one] for one in references])[0]
        return statistics

    def scores(sums: Sums) -> list[float]:
        return [corpus._compute_score_from_stats(sums[:-1].astype(int).tolist()).score]

    return Metric((name,), count, scores, str(corpus.get_signature()))


def ranked(name: str) -> Metric:
    """A score of several answers, such as recall@5: `settings.consistency.RANKED`."""
    family, _, depth = name.partition("@")

    def count(answers: Sequence[str], references: Sequence[str]) -> list[float]:
        right = set(map(str.strip, references))
        ranks = (rank for rank, answer in enumerate(answers, 1) if answer.strip() in right)
        rank = next(ranks, math.inf)
        gain = {"recall": 1.0, "ndcg": 1 / math.log2(rank + 1), "mrr": 1 / rank}[family]
        return [gain if rank <= int(depth or len(answers)) else 0.0]

    return Metric((name,), count)


BLEU = partial(sacrebleu, "bleu", "BLEU", force=True)
CHRF_WITH_WORDS = partial(sacrebleu, "chrf++", "CHRF", word_order=2)
# Score -> the metrics that it follows from. `SCORES` of `settings/consistency.py` has the same names.
METRICS: dict[str, tuple[Callable[[], Metric], ...]] = {
    "exact_match": (squad,),
    "f1": (squad,),
    "bleu": (BLEU,),
    "chrf": (partial(sacrebleu, "chrf", "CHRF", word_order=0),),
    "chrf++": (CHRF_WITH_WORDS,),
    GEOMETRIC_MEAN: (BLEU, CHRF_WITH_WORDS),
    **dict.fromkeys(ROUGE, (rouge,)),
    "char_bleu": (partial(sacrebleu, "char_bleu", "BLEU", force=True, tokenize="zh"),),
    "identical": (identical,),
}
