"""Answers without training to a recipe's held-out rows, scored like the model's.

Nearest neighbour: the response of the training row whose prompt is most alike by BM25 (words; of Chinese, Japanese and
Korean, letters). First sentence: of the prompt itself, for summaries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from settings.loading import load
from training.evaluation.scores import AnswerScores, metric_names

Pair = tuple[str, ...]  # prompt, response
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s*(?=\S)|\n")


def pairs_of(files: str, recipe: str) -> list[Pair]:
    """Prompts and responses of a recipe's files, as `train` reads them."""
    data = load("train", {"preset": f"recipe_{recipe}"}).data
    columns = (data.prompt_column, data.response_column)
    return [pair for batch in read_rows(find(files), columns, BadRows(skip=True)) for pair in batch if all(pair)]


def first_sentence(text: str) -> str:
    """What stands before the first end of a sentence or of a line."""
    return _SENTENCE_END.split(text.strip(), maxsplit=1)[0]


def nearest(train: Sequence[Pair], prompts: Sequence[str]) -> list[str]:
    """To each prompt the response of the training row most like it."""
    index = Index([words(prompt) for prompt, _ in train])
    return [train[next(iter(index.best(words(prompt), 1)), 0)][1] for prompt in prompts]


class Index:
    """Texts, each a list of words, to be found by BM25. Memory: some 10 bytes a word."""

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        import bm25s

        self._index = bm25s.BM25()
        self._index.index(texts, show_progress=False)

    def best(self, asked: Sequence[str], count: int) -> list[int]:
        """Numbers of the texts most like some words, the best first; none where no word is known."""
        known = [word for word in asked if word in self._index.vocab_dict]
        if not known:
            return []
        return np.argsort(-self._index.get_scores(known), kind="stable")[:count].tolist()  # type: ignore[no-any-return]


def words(text: str) -> list[str]:
    """Lower-case words, and each letter of the scripts that put no spaces between them."""
    return _TOKEN.findall(text.lower())


def simple_scores(recipe: str, files: str, held_out: str, metrics: str, rows: int) -> dict[str, dict[str, float]]:
    """Method -> its scores on the first rows of the held-out file."""
    asked = pairs_of(held_out, recipe)[:rows]
    prompts = [prompt for prompt, _ in asked]
    methods: dict[str, Callable[[], list[str]]] = {
        "nearest neighbour (BM25)": lambda: nearest(pairs_of(files, recipe), prompts)
    }
    if recipe == "summarise":
        methods["the first sentence"] = lambda: [first_sentence(prompt) for prompt in prompts]
    return {name: _scored(answers(), [right for _, right in asked], metrics) for name, answers in methods.items()}


def _scored(answers: Sequence[str], references: Sequence[str], metrics: str) -> dict[str, float]:
    scores = AnswerScores(metric_names(metrics, 1))
    for answer, reference in zip(answers, references, strict=True):
        scores.add(answer, reference)
    return scores.result()
