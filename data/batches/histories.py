"""Pairs of histories: what came before each place, and the item there. Made when they are read, not stored.

A history is stored once: the ids of its items joined (`input_ids`), each behind a separator, the ids of each item as a text
(`labels`), and of each item three numbers (`item_lengths`): tokens of the separator before it, its own, and those of its text.
The first item of a prompt has the tokens of its text, as a tokenizer gives them where a text begins. Which history and which
place a number is follows from the counts of items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
NUMBERS = 3  # of an item


@dataclass(frozen=True)
class Augmentation:
    """What is drawn anew for each training pair.

    Args:
        reverse: share of pairs of the reversed history, in which the items after a place predict the item there.
        dropout: share of past items that are left out; one stays.
    """

    reverse: float = 0.0
    dropout: float = 0.0


class HistoryRows(Sequence[dict[str, Any]]):
    """The pairs of stored histories, `input_ids` and `labels`, each with end of text.

    Args:
        rows: of histories. items: (histories,) how many each has, 2 or more.
        window: most items of a prompt; most_tokens: of a prompt with end of text, which holds whole items.
        only_last: whether the last item alone is an answer, as in validation.
    Memory: 8 bytes a history.
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], items: Counts, window: int, most_tokens: int, eos_id: int, only_last: bool
    ) -> None:
        self._rows, self._window, self._most_tokens = rows, window, most_tokens
        self._eos = np.array([eos_id])
        self._ends = None if only_last else np.cumsum(items - 1)

    def __len__(self) -> int:
        return len(self._rows) if self._ends is None else int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return self.pair(index)

    def pair(self, index: int, augmentation: Augmentation | None = None, key: int = 0) -> dict[str, Any]:
        """A pair; `key` fixes what the augmentation draws."""
        history = index if self._ends is None else int(np.searchsorted(self._ends, index, "right"))
        ids, labels, numbers = self._rows[history].values()
        starts, ends, answers = spans(numbers)
        place = len(starts) - 1
        if self._ends is not None:
            place = index + 1 - (int(self._ends[history - 1]) if history else 0)
        if augmentation is None:
            first = first_item(ends, answers, place, self._window, self._most_tokens)
            behind = [ids[ends[first] : ends[place - 1]]]
        else:
            rng = np.random.Generator(np.random.Philox(key=key))
            past = np.arange(place)
            if rng.random() < augmentation.reverse:
                place, past = len(starts) - 1 - place, np.arange(len(starts) - 1, len(starts) - 1 - place, -1)
            past = past[-self._window :]
            is_left = rng.random(len(past)) >= augmentation.dropout
            is_left[rng.integers(len(past))] = True
            past = past[is_left]
            first, behind, count = past[-1], [], 0
            for item, after in reversed(list(pairwise(past))):  # the first ones are left out where they are too many
                nearer = max(item, after)
                more = [ids[ends[nearer - 1] : starts[nearer]], ids[starts[after] : ends[after]]]
                count += sum(map(len, more))
                if count + answers[item] >= self._most_tokens:
                    break
                first, behind = item, [*more, *behind]
        text_ends = answers.cumsum()
        begin, answer = (labels[text_ends[item] - answers[item] : text_ends[item]] for item in (first, place))
        prompt = np.concatenate([begin, *behind])[: self._most_tokens - 1]
        return {"input_ids": np.concatenate([prompt, self._eos]), "labels": np.concatenate([answer, self._eos])}


def spans(numbers: NDArray[np.integer[Any]]) -> tuple[Counts, Counts, Counts]:
    """Of the items of a history where each begins and ends, and the tokens of its answer."""
    gaps, own, answers = numbers.astype(np.int64).reshape(-1, NUMBERS).T
    ends = (gaps + own).cumsum()
    return ends - own, ends, answers


def first_item(ends: Counts, answers: Counts, place: Any, window: int, most_tokens: int | None) -> Any:
    """The first item of the prompt before a place, or before each of several."""
    first = np.maximum(place - window, 0)
    if most_tokens is not None:
        begins = np.minimum.accumulate((ends - answers)[::-1])[::-1]  # of a prompt that begins with each item
        first = np.maximum(first, np.searchsorted(begins, ends[place - 1] - (most_tokens - 1)))
    return np.minimum(first, place - 1)


def reversed_numbers(numbers: NDArray[np.integer[Any]]) -> Counts:
    """The numbers of a history's items, from its last to its first."""
    turned = numbers.astype(np.int64).reshape(-1, NUMBERS)[::-1].copy()
    turned[1:, 0], turned[0, 0] = turned[:-1, 0].copy(), 0
    return turned.ravel()


def pair_lengths(
    numbers: Sequence[NDArray[np.integer[Any]]], window: int, most_tokens: int | None, only_last: bool
) -> tuple[Counts, Counts]:
    """Encoder and decoder tokens of each pair of histories, with end of text."""
    inputs, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for history in numbers:
        _, ends, answers = spans(history)
        places = np.arange(1, len(ends))
        first = first_item(ends, answers, places, window, most_tokens)
        found = ends[:-1] - ends[first] + answers[first] + 1
        found = found if most_tokens is None else np.minimum(found, most_tokens)
        inputs.append(found[-1:] if only_last else found)
        targets.append(answers[-1:] + 1 if only_last else answers[1:] + 1)
    return np.concatenate(inputs), np.concatenate(targets)
