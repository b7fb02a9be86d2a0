"""Prompts that bring the translation of the most similar known text along, for the recipe akkadian.

    python -m benchmarks.parts.translation_memory TRAIN FOLDER [FILE ...]

TRAIN is JSONL with prompt and response. Writes FOLDER/train.jsonl, in which each prompt is followed by the response of the most
similar *other* row, and each FILE (prompts, with or without responses) by the responses of TRAIN: what a model trained on the first
expects of every prompt later. A prompt like which there is none stays as it is.

Similar: of the rows with the best BM25, the one that shares most words in the same order (difflib's ratio).
Source: Bulte and Tezcan 2019, "Neural Fuzzy Repair".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from benchmarks.parts.rows import read_rows, write_rows

CANDIDATES = 4  # by BM25, of which the most similar is taken
LEAST_RATIO = 0.2  # of words in common; what is less similar is left out
MOST_WORDS = 60  # of a prompt that are looked up
SEPARATOR = " | "


class TranslationMemory:
    """The known pairs.

    Memory: the pairs, and an index of some 10 bytes a word.
    """

    def __init__(self, pairs: Sequence[dict[str, str]]) -> None:
        import bm25s

        self.responses = [pair["response"] for pair in pairs]
        self._words = [words_of(pair["prompt"]) for pair in pairs]
        self._index = bm25s.BM25()
        self._index.index(self._words, show_progress=False)

    def recall(self, prompt: str, own: int | None = None) -> str | None:
        """The response to the most similar prompt, or None; `own`: the number of a row that is not to be found, since it is asked for."""
        words = words_of(prompt)
        known = [word for word in dict.fromkeys(words) if word in self._index.vocab_dict][:MOST_WORDS]
        if not known:
            return None
        scores = self._index.get_scores(known)
        if own is not None:
            scores[own] = 0.0
        best, highest = None, LEAST_RATIO
        matcher = SequenceMatcher(None, autojunk=False)
        matcher.set_seq2(words)
        numbers = np.argsort(-scores)[:CANDIDATES]
        for number in numbers[scores[numbers] > 0]:
            matcher.set_seq1(self._words[number])
            if (ratio := matcher.ratio()) > highest:
                best, highest = int(number), ratio
        return None if best is None else self.responses[best]


def words_of(text: str) -> list[str]:
    return text.lower().split()


def main(arguments: Sequence[str]) -> None:
    """Write the rows."""
    if len(arguments) < 2:
        sys.exit(__doc__)
    train, folder = Path(arguments[0]), Path(arguments[1])
    pairs = read_rows(train)
    memory = TranslationMemory(pairs)

    def prepared(rows: Sequence[dict[str, str]], are_known: bool) -> Iterator[dict[str, str]]:
        for number, row in enumerate(rows):
            found = memory.recall(row["prompt"], number if are_known else None)
            yield row if found is None else {**row, "prompt": f"{row['prompt']}{SEPARATOR}{found}"}

    write_rows(folder / "train.jsonl", prepared(pairs, True))
    for file in map(Path, arguments[2:]):
        write_rows(folder / file.name, prepared(read_rows(file), False))


if __name__ == "__main__":
    main(sys.argv[1:])
