"""How near generated answers are to the right ones: sums over rows, from which every score of a corpus follows.

No score needs the texts once a row is counted: exact match, token F1 and those of ranked answers are means, BLEU and chrF follow from summed
n-gram counts, ROUGE is the mean of its rows. So a metric turns one row into a few numbers, numbers are added, and the
sums of several processes add up alike. All scores are percentages.

Chinese: letters of Chinese, Japanese and Korean are tokens of their own for F1, ROUGE and `char_bleu`; other text is
split as the metric's own program does it.

Several right answers: exact match, F1 and ROUGE count the best of them, each for itself; sacrebleu takes them as its references.

Ranked answers: a right answer is found where an answer is the same text, the first of them counts. Recall@K is whether it is among the first K,
NDCG@K is 1 / log2(rank + 1) there, MRR is 1 / rank among all.
Source: SQuAD's evaluation script (arXiv 1606.05250); sacrebleu (arXiv 1804.08771); rouge-score of google-research.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.sources.files import set_names
from language import join, say
from run_files import EVAL_COUNTS
from settings.consistency import (
    GEOMETRIC_MEAN,
    RANKED,
    RANKED_SHOWN,
    ROUGE,
    ranked_words,
    score_words,
    writes_answers,
)
from settings.declared import Config
from settings.errors import UserError, refuse
from settings.fields import AUTO, not_known
from training.evaluation.stopping import LOSS

Sums = NDArray[np.float64]
OwnMetric = Callable[[list[str], list[str]], float]  # of answers and references; more is better
# Where all right answers are one word, the others say the same again or have no n-grams to count.
WORD_SCORES = ("exact_match", "f1", "chrf")
LONGEST_CJK_WORD = 4  # letters
FIGURES = ("event", "loss", "perplexity", *EVAL_COUNTS)  # of an evaluation beside its scores

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_CJK_LETTER = re.compile(f"([{_CJK}])")
_ROUGE_TOKEN = re.compile(f"[{_CJK}]|[^\\W_{_CJK}]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalised(text: str) -> str:
    """SQuAD's form of an answer: lower case, without punctuation and articles, single spaces. Of any script."""
    kept = "".join(
        letter for letter in text.lower() if letter not in string.punctuation and unicodedata.category(letter)[0] != "P"
    )
    return " ".join(_ARTICLES.sub(" ", kept).split())


def token_f1(answer: str, reference: str) -> float:
    """SQuAD's F1 over the tokens of two answers, 0 to 1; both empty is 1."""
    given, wanted = (_CJK_LETTER.sub(r" \1 ", normalised(text)).split() for text in (answer, reference))
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted))


def is_word(text: str) -> bool:
    """Whether a text is a single word: without blanks, and of Chinese, Japanese or Korean no longer than such words are."""
    return len(text.split()) <= 1 and len(_CJK_LETTER.findall(text)) <= LONGEST_CJK_WORD


@dataclass(frozen=True)
class Metric:
    """One way to compare, of one score or several.

    Args:
        names: of its scores. count: the numbers of one row, of its answers, best first, and the right ones; always as many.
        signature: sacreBLEU's.
        scores: the percentages, one for each name, of the summed numbers, the last of which is the number of rows: means of rows, unless
            a metric says otherwise.
    """

    names: tuple[str, ...]
    count: Callable[[Sequence[str], Sequence[str]], Sequence[float]]
    scores: Callable[[Sums], Sequence[float]] = lambda sums: (100 * sums[:-1] / sums[-1]).tolist()
    signature: str = ""


def _gain(name: str, answers: Sequence[str], references: Sequence[str]) -> float:
    """What a row adds to a score of ranked answers, 0 to 1."""
    right = {reference.strip() for reference in references}
    found = (rank for rank, answer in enumerate(answers, 1) if answer.strip() in right)
    rank, (family, _, depth) = next(found, math.inf), name.partition("@")
    if rank > int(depth or len(answers)):
        return 0.0
    return {"recall": 1.0, "ndcg": 1 / math.log2(rank + 1), "mrr": 1 / rank}[family]


def _made(kind: str) -> Metric:
    if RANKED.fullmatch(kind):
        return Metric((kind,), lambda answers, references: [_gain(kind, answers, references)])
    if kind == "squad":
        return Metric(
            ("exact_match", "f1"),
            lambda answers, references: [
                any(normalised(answers[0]) == normalised(reference) for reference in references),
                max(token_f1(answers[0], reference) for reference in references),
            ],
        )
    if kind == "identical":  # where every mark counts, as in phones, dates and numbers
        return Metric(
            ("identical",),
            lambda answers, references: [answers[0].strip() in [reference.strip() for reference in references]],
        )
    if kind == "rouge":  # for -Lsum the lines of a text are its sentences, as in rouge_score itself
        from rouge_score.rouge_scorer import RougeScorer

        # words as its own tokenizer takes them for English, and letters of Chinese
        tokenizer = SimpleNamespace(tokenize=lambda text: _ROUGE_TOKEN.findall(text.lower()))
        scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], tokenizer=tokenizer)

        def best(answers: Sequence[str], references: Sequence[str]) -> list[float]:
            return [score.fmeasure for score in scorer.score_multi(references, answers[0]).values()]

        return Metric(ROUGE, best)
    from sacrebleu.metrics import BLEU, CHRF

    metric: Any
    if kind in ("chrf", "chrf++"):
        metric = CHRF(word_order=2 if kind == "chrf++" else 0)
    else:
        metric = BLEU(force=True, **({"tokenize": "zh"} if kind == "char_bleu" else {}))
    metric.num_refs = 1
    return Metric(
        (kind,),
        lambda answers, references: metric._extract_corpus_statistics([answers[0]], [[one] for one in references])[0],
        lambda sums: [metric._compute_score_from_stats(sums[:-1].astype(int).tolist()).score],
        str(metric.get_signature()),
    )


# word of --metrics -> what computes it
_WORDS = {
    "exact_match": ("squad",), "f1": ("squad",), "bleu": ("bleu",), "chrf": ("chrf",), "chrf++": ("chrf++",),
    GEOMETRIC_MEAN: ("bleu", "chrf++"), **dict.fromkeys(ROUGE, ("rouge",)), "char_bleu": ("char_bleu",),
    "identical": ("identical",),
}  # fmt: skip


def metric_names(config: Config) -> list[str]:
    """The scores that `--metrics` asks for, in the order of the table above, those of ranked answers last; auto: all.

    Raises:
        UserError: unknown names, all of them.
    """
    asked, ranked = config.metrics.metrics, ranked_words(config.metrics.metrics, config.answer.num_answers)
    if asked == AUTO:
        return [*_WORDS, *ranked]
    words = score_words(asked)
    unknown = [word for word in words if word not in _WORDS and word not in ranked]
    if unknown or not words:
        raise UserError(
            "--metrics = {asked}, {value} is not known; allowed: auto, {other_value}",
            asked=asked,
            value=join(", ", unknown) or say("nothing"),
            other_value=join(", ", (*_WORDS, "rouge", *RANKED_SHOWN)),
        )
    return [*(name for name in _WORDS if name in words), *ranked]


def check_decisive(config: Config, own: Collection[str]) -> None:
    """Refuse metrics of one's own whose names are taken, and a `metric_for_best` that no evaluation has.

    Args:
        own: names of the user's own metrics.
    Raises:
        UserError: all problems at once.
    """
    best, sets = config.train.metric_for_best, set_names(config.data.validation_file)
    taken = {*_WORDS, *FIGURES}
    problems: list[str] = [say("metrics[{name!r}], is the name of another figure, or none; use letters, digits and _", name=name) for name in own if name in taken or not name.isidentifier()]  # fmt: skip
    if own and not writes_answers(config.metrics):
        problems.append(
            say("--eval_generate_rows = 0, writes no answers for metrics of your own; name how many, such as 64")
        )
    of_set, _, figure = best.rpartition("/")
    if (figure not in {LOSS, *_WORDS, *own, *config.task.scores} and not RANKED.fullmatch(figure)) or (
        of_set and of_set not in sets
    ):
        known = [*(f"{name}/{LOSS}" for name in sets), LOSS, *own, *_WORDS, *RANKED_SHOWN]
        problems.append(say("--metric_for_best = {best}, {problem}", best=best, problem=not_known(best, known)))
    refuse(problems)


def own_scores(metrics: Mapping[str, OwnMetric], pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """What the user's own metrics say of answers and references.

    Raises:
        UserError: one failed, or gave no number.
    """
    found = {}
    for name, metric in metrics.items():
        try:
            found[name] = float(metric([answer for answer, _ in pairs], [reference for _, reference in pairs]))
        except Exception as error:  # of code that is not ours
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            told = say(
                "metrics[{name!r}], failed on {count} answers ({reason}); it takes two lists of texts and gives a "
                "number",
                name=name,
                count=len(pairs),
                reason=reason,
            )
            raise UserError(told) from error
    return found


class AnswerScores:
    """Scores of answers that come one by one.

    Args:
        names: scores, see `metric_names`.
    Memory: some fifty numbers; the libraries of sacrebleu 3 MB and of ROUGE 17 MB, loaded where asked for.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        kinds = dict.fromkeys(kind for name in names for kind in _WORDS.get(name, (name,)))
        self._metrics = [_made(kind) for kind in kinds]
        widths = [len(metric.count([""], [""])) for metric in self._metrics]
        self._ends = np.cumsum(widths).tolist()
        self.sums: Sums = np.zeros(sum(widths) + 1)  # the last one counts rows

    @property
    def signatures(self) -> dict[str, str]:
        """Score name -> sacreBLEU's signature of how it is computed."""
        return {metric.names[0]: metric.signature for metric in self._metrics if metric.signature}

    def add(self, answer: str, references: str | Sequence[str], others: Sequence[str] = ()) -> None:
        """Count one row; `references`: the right answer, or several; `others`: further answers, the next best first."""
        answers = [answer, *others]
        right = [references] if isinstance(references, str) else references
        numbers = [number for metric in self._metrics for number in metric.count(answers, right)]
        self.sums += np.array([*numbers, 1.0])

    def result(self, sums: Sums | None = None) -> dict[str, float]:
        """Score name -> percentage, of the own sums or of those gathered over processes; empty where no row was counted."""
        sums = self.sums if sums is None else sums
        if not sums[-1]:
            return {}
        found: dict[str, float] = {}
        for metric, begin, end in zip(self._metrics, [0, *self._ends], self._ends, strict=False):
            found.update(zip(metric.names, metric.scores(np.append(sums[begin:end], sums[-1])), strict=True))
        if GEOMETRIC_MEAN in self.names:
            found[GEOMETRIC_MEAN] = (found["bleu"] * found["chrf++"]) ** 0.5
        return {name: float(found[name]) for name in self.names}
