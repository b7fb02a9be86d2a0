"""A translation memory in front of a model: known texts are answered from it, all others by the model.

    python -m benchmarks.parts.translation_memory MODEL TRAIN FILE [--FLAG=VALUE ...]

TRAIN and FILE are JSONL with prompt and response. A prompt of FILE that is like one of TRAIN gets its response. Alike:
of the rows with the best BM25, the one that shares most words in the same order, a share of both texts' words
(difflib's ratio) of at least 0.6. BLEU, chrF++ and their geometric mean of the model's answers, of the memory's and of
both go into docs/recipes.md, by how alike the prompts are, too; the section is named after TRAIN (akkadian_train.jsonl:
akkadian). Flags go to `generate`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.page import ROOT, markdown, write_part
from benchmarks.parts.pronunciation import answer
from benchmarks.parts.rows import read_rows
from benchmarks.parts.simple_answers import Index
from training.evaluation.scores import AnswerScores

CANDIDATES = 5  # by BM25, of which the most similar is taken
ALIKE = 0.6
STEPS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)
NAMES = ("geometric_mean", "bleu", "chrf++")


class TranslationMemory:
    """Known pairs."""

    def __init__(self, pairs: Sequence[dict[str, str]]) -> None:
        self._responses = [pair["response"] for pair in pairs]
        self._words = [_words(pair["prompt"]) for pair in pairs]
        self._index = Index(self._words)

    def recall(self, prompt: str) -> tuple[str, float]:
        """The response of the most similar pair, and how alike its prompt is, 0 to 1; of nothing known an empty one."""
        words, response, highest = _words(prompt), "", 0.0
        matcher = SequenceMatcher(None, autojunk=False)
        matcher.set_seq2(words)
        for number in self._index.best(words, CANDIDATES):
            matcher.set_seq1(self._words[number])
            if (ratio := matcher.ratio()) > highest:
                response, highest = self._responses[number], ratio
        return response, highest


def _words(text: str) -> list[str]:
    return text.lower().split()


def scored(answers: Sequence[str], references: Sequence[str]) -> list[str]:
    scores = AnswerScores(NAMES)
    for given, right in zip(answers, references, strict=True):
        scores.add(given, right)
    return [f"{value:.1f}" for value in scores.result().values()]


def table(model: Sequence[str], recalled: Sequence[tuple[str, float]], references: Sequence[str]) -> str:
    """The scores of all rows, and of those with prompts that are alike to some degree."""
    ratios = np.array([ratio for _, ratio in recalled])
    both = [known if ratio >= ALIKE else given for given, (known, ratio) in zip(model, recalled, strict=True)]
    sides = (model, [known for known, _ in recalled], both)
    most = 2.0  # more than any ratio
    groups = {"all": (0.0, most)} | {f"from {low} to {high}": (low, high) for low, high in pairwise(STEPS)}
    groups[f"from {STEPS[-1]}"] = STEPS[-1], most
    shown = []
    for name, (low, high) in groups.items():
        rows = np.flatnonzero((ratios >= low) & (ratios < high)).tolist()
        if rows:
            right = [references[row] for row in rows]
            cells = [" / ".join(scored([side[row] for row in rows], right)) for side in sides]
            shown.append([name, f"{len(rows):,}", *cells])
    head = markdown(
        ["a known prompt is alike", "rows", "the model", "the memory", f"memory from {ALIKE} on, else model"], shown
    )
    return f"Geometric mean / BLEU / chrF++.\n\n{head}"


def main(arguments: Sequence[str]) -> None:
    """Measure, and write the section."""
    names = [word for word in arguments if not word.startswith("--")]
    if len(names) != 3:
        sys.exit(__doc__)
    model, train, file = names
    rows, memory = read_rows(Path(file)), TranslationMemory(read_rows(Path(train)))
    prompts = [row["prompt"] for row in rows]
    answers = answer(model, prompts, [word for word in arguments if word.startswith("--")])
    body = table(answers, [memory.recall(prompt) for prompt in prompts], [row["response"] for row in rows])
    name = Path(train).stem.removesuffix("_train")
    title = f"A translation memory in front of the model: {name}"
    print(body)
    write_part(ROOT / "docs" / "recipes.md", f"translation-memory-{name}", title, body, {})


if __name__ == "__main__":
    main(sys.argv[1:])
