"""How near generated answers are to the right ones: sums over rows, from which every score of a corpus follows.

No score needs the texts once a row is counted: exact match, token F1 and those of ranked answers are means, BLEU and
chrF follow from summed n-gram counts, ROUGE is the mean of its rows. So the sums of several processes add up alike. All
scores are percentages; `metrics` has a function for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from data.sources.files import set_names
from settings.consistency import GEOMETRIC_MEAN, RANKED, RANKED_SHOWN, SCORES, ranked_words, score_words
from settings.errors import UserError, refuse
from settings.fields import AUTO, not_known
from support.language import join, say
from training.evaluation.metrics import METRICS, Sums, ranked
from training.evaluation.stopping import LOSS
from training.report.run_files import EVAL_COUNTS

# A metric of the user's own takes answers and references; more is better.
OwnMetric = Callable[[list[str], list[str]], float]
# Where all right answers are one word, the others say the same again or have no n-grams to count.
WORD_SCORES = ("exact_match", "f1", "chrf")
# An evaluation has these figures beside its scores.
FIGURES = ("event", "loss", "perplexity", *EVAL_COUNTS)


def metric_names(metrics: str, num_answers: int) -> list[str]:
    """The scores that evaluations form, in the order of `SCORES`, those of several answers last.

    Args:
        metrics: the setting; auto: all. num_answers: to each prompt; scores of several answers stand last.
    Raises:
        UserError: unknown names, all of them.
    """
    of_several = ranked_words(metrics, num_answers)
    words = list(SCORES) if metrics == AUTO else score_words(metrics)
    unknown = [word for word in words if word not in (*SCORES, *of_several)]
    if unknown or not words:
        raise UserError(
            "--metrics = {asked}, {value} is not known; allowed: auto, {other_value}",
            asked=metrics,
            value=join(", ", unknown) or say("nothing"),
            other_value=join(", ", (*SCORES, "rouge", *RANKED_SHOWN)),
        )
    return [*(name for name in SCORES if name in words), *of_several]


def check_decisive(
    best: str, validation_file: str | None, own: Collection[str], label_scores: Collection[str], writes_answers: bool
) -> None:
    """Refuse metrics of one's own whose names are taken, and a `metric_for_best` that no evaluation has.

    Args:
        best: `--metric_for_best`. validation_file: whose sets may have names.
        own: names of the user's own metrics. label_scores: of the task. writes_answers: whether evaluations do.
    Raises:
        UserError: all problems at once.
    """
    sets = set_names(validation_file)
    problems = [
        say("metrics[{name!r}], is the name of another figure, or none; use letters, digits and _", name=name)
        for name in own
        if name in (*SCORES, *FIGURES) or not name.isidentifier()
    ]
    if own and not writes_answers:
        problems.append(
            say("--eval_generate_rows = 0, writes no answers for metrics of your own; name how many, such as 64")
        )
    of_set, _, figure = best.rpartition("/")
    is_figure = figure in {LOSS, *SCORES, *own, *label_scores} or RANKED.fullmatch(figure)
    if not is_figure or of_set not in ("", *sets):
        allowed = [*(f"{name}/{LOSS}" for name in sets), LOSS, *own, *SCORES, *RANKED_SHOWN]
        problems.append(say("--metric_for_best = {best}, {problem}", best=best, problem=not_known(best, allowed)))
    refuse(problems)


def own_scores(metrics: Mapping[str, OwnMetric], pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """What the user's own metrics say of answers and references.

    Raises:
        UserError: one failed, or gave no number.
    """
    answers = [answer for answer, _ in pairs]
    references = [reference for _, reference in pairs]
    scores = {}
    for name, metric in metrics.items():
        try:
            scores[name] = float(metric(answers, references))
        except Exception as error:  # The code of the metric is the user's.
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError(
                "metrics[{name!r}], failed on {count} answers ({reason}); it takes two lists of texts and gives a "
                "number",
                name=name,
                count=len(pairs),
                reason=reason,
            ) from error
    return scores


class AnswerScores:
    """Scores of answers that come one by one.

    Args:
        names: scores, see `metric_names`.
    Memory: some fifty numbers; the libraries of sacrebleu 3 MB and of ROUGE 17 MB, loaded where asked for.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        kinds = dict.fromkeys(kind for name in names for kind in METRICS.get(name, ()))
        self._metrics = [*(kind() for kind in kinds), *map(ranked, filter(RANKED.fullmatch, names))]
        widths = [len(metric.count([""], [""])) for metric in self._metrics]
        self._begins = np.cumsum([0, *widths]).tolist()
        self.sums: Sums = np.zeros(sum(widths) + 1)  # The last one counts rows.

    @property
    def signatures(self) -> dict[str, str]:
        """Score name -> sacreBLEU's signature of how it is computed."""
        return {metric.names[0]: metric.signature for metric in self._metrics if metric.signature}

    def add(self, answer: str, references: str | Sequence[str], further: Sequence[str] = ()) -> None:
        """Count one row; `references`: the right answer, or several; `further`: answers, the next best first."""
        right = [references] if isinstance(references, str) else references
        numbers = [number for metric in self._metrics for number in metric.count([answer, *further], right)]
        self.sums += np.array([*numbers, 1.0])

    def result(self, sums: Sums | None = None) -> dict[str, float]:
        """Score name -> percentage, of the own sums or of those gathered over processes; empty where no row was
        counted.
        """
        sums = self.sums if sums is None else sums
        if not sums[-1]:
            return {}
        scores: dict[str, float] = {}
        for metric, begin, end in zip(self._metrics, self._begins, self._begins[1:], strict=False):
            scores.update(zip(metric.names, metric.scores(np.append(sums[begin:end], sums[-1])), strict=True))
        if GEOMETRIC_MEAN in self.names:
            scores[GEOMETRIC_MEAN] = (scores["bleu"] * scores["chrf++"]) ** 0.5
        return {name: float(scores[name]) for name in self.names}
