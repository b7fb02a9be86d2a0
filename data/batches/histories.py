"""Pairs of histories: what came before each place, and the item there. Made when they are read, not stored.

A history is stored once: the ids of its items joined (`input_ids`), each behind a separator, the ids of each item as a text
(`labels`), and of each item three numbers (`item_lengths`): tokens of the separator before it, its own, and those of its text.
The first item of a prompt has the tokens of its text, as a tokenizer gives them where a text begins. Which history and which
place a number is follows from the counts of items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
NUMBERS = 3  # of an item


@dataclass(frozen=True)
class Past:
    """What lies before the last item of a history.

    Args:
        prompts: token ids of those that end one item earlier each, with end of text. items: token ids of all its items.
    """

    prompts: Sequence[list[int]]
    items: list[int]


Pasts = Sequence[Past | None] | None  # of several prompts; None: none is of a history


@dataclass(frozen=True)
class Reach:
    """How much of a history a prompt holds.

    Args:
        past_items: most. input_tokens: most with end of text, of whole items, one at least; None: any.
    """

    past_items: int
    input_tokens: int | None


class HistoryRows(Sequence[dict[str, Any]]):
    """The pairs of stored histories, `input_ids` and `labels`, each with end of text.

    Args:
        rows: of histories. items: (histories,) how many each has, 2 or more.
        only_last: whether the last item alone is an answer, as in validation.
    Memory: 8 bytes a history.
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], items: Counts, reach: Reach, eos_id: int, only_last: bool
    ) -> None:
        self._rows, self._reach = rows, reach
        self._eos = np.array([eos_id])
        self._ends = None if only_last else np.cumsum(items - 1)

    def __len__(self) -> int:
        return len(self._rows) if self._ends is None else int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return self.pair(index)

    def pair(self, index: int, reverse: float = 0.0, key: int = 0) -> dict[str, Any]:
        """A pair; `key` decides whether it is one of the reversed history, as a share `reverse` of all keys does."""
        history = index if self._ends is None else int(np.searchsorted(self._ends, index, "right"))
        ids, labels, numbers = self._rows[history].values()
        if reverse and np.random.Generator(np.random.Philox(key=key)).random() < reverse:
            ids, labels, numbers = _reversed(ids, labels, numbers)
        _, ends, answers = spans(numbers)
        place = len(ends) - 1
        if self._ends is not None:
            place = index + 1 - (int(self._ends[history - 1]) if history else 0)
        return {
            "input_ids": self._prompt(ids, labels, ends, answers, place),
            "labels": np.concatenate([_text(labels, answers, place), self._eos]),
        }

    def past(self, index: int, prompts: int) -> Past | None:
        """What lies before the pair of a history that has one; otherwise None.

        Args:
            prompts: most of the history, that of the pair among them.
        """
        if self._ends is not None:
            return None
        ids, labels, numbers = self._rows[index].values()
        _, ends, answers = spans(numbers)
        last = len(ends) - 1
        places = range(last - 1, max(last - prompts, 0), -1)
        earlier = [self._prompt(ids, labels, ends, answers, place).tolist() for place in places]
        return Past(earlier, ids[: ends[last - 1]].tolist())

    def _prompt(
        self, ids: NDArray[Any], labels: NDArray[Any], ends: Counts, answers: Counts, place: int
    ) -> NDArray[Any]:
        """The items before a place, as many as fit, with end of text."""
        first = first_item(ends, answers, place, self._reach)
        prompt = np.concatenate([_text(labels, answers, first), ids[ends[first] : ends[place - 1]]])
        if self._reach.input_tokens is not None:
            prompt = prompt[: self._reach.input_tokens - 1]
        return np.concatenate([prompt, self._eos])


def _text(labels: NDArray[Any], answers: Counts, item: int) -> NDArray[Any]:
    """The tokens of an item where a text begins."""
    end = int(answers[: item + 1].sum())
    return labels[end - int(answers[item]) : end]


def spans(numbers: NDArray[np.integer[Any]]) -> tuple[Counts, Counts, Counts]:
    """Of the items of a history where each begins and ends, and the tokens of its answer."""
    gaps, own, answers = numbers.astype(np.int64).reshape(-1, NUMBERS).T
    ends = (gaps + own).cumsum()
    return ends - own, ends, answers


def first_item(ends: Counts, answers: Counts, place: Any, reach: Reach) -> Any:
    """The first item of the prompt before a place, or before each of several."""
    first = np.maximum(place - reach.past_items, 0)
    if reach.input_tokens is not None:
        begins = np.minimum.accumulate((ends - answers)[::-1])[::-1]  # of a prompt that begins with each item
        first = np.maximum(first, np.searchsorted(begins, ends[place - 1] - (reach.input_tokens - 1)))
    return np.minimum(first, place - 1)


def reversed_numbers(numbers: NDArray[np.integer[Any]]) -> Counts:
    """The numbers of a history's items, from its last to its first."""
    turned = numbers.astype(np.int64).reshape(-1, NUMBERS)[::-1].copy()
    turned[1:, 0], turned[0, 0] = turned[:-1, 0].copy(), 0
    return turned.ravel()


def pair_lengths(numbers: Sequence[NDArray[np.integer[Any]]], reach: Reach, only_last: bool) -> tuple[Counts, Counts]:
    """Encoder and decoder tokens of each pair of histories, with end of text."""
    inputs, targets = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for history in numbers:
        _, ends, answers = spans(history)
        first = first_item(ends, answers, np.arange(1, len(ends)), reach)
        found = ends[:-1] - ends[first] + answers[first] + 1
        found = found if reach.input_tokens is None else np.minimum(found, reach.input_tokens)
        wanted = answers[1:] + 1
        inputs.append(found[-1:] if only_last else found)
        targets.append(wanted[-1:] if only_last else wanted)
    return np.concatenate(inputs), np.concatenate(targets)


def _reversed(*row: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], Counts]:
    """A row of a history from its last item to its first."""
    ids, labels, numbers = row
    starts, ends, answers = spans(numbers)
    text_ends = answers.cumsum()
    items = np.arange(len(ends))[::-1]
    turned = [ids[starts[items[0]] : ends[items[0]]]]
    for item in items[1:]:
        turned += [ids[ends[item] : starts[item + 1]], ids[starts[item] : ends[item]]]
    texts = [labels[text_ends[item] - answers[item] : text_ends[item]] for item in items]
    return np.concatenate(turned), np.concatenate(texts), reversed_numbers(numbers)
