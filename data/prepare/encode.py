"""Batches of text rows into batches of id rows: the work that preparing gives to its processes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.batches.objectives import Lengths
from data.shards.store import PAIRS, PREFERENCES
from data.text.clean import Dropped
from data.text.conversations import Examples, Row
from data.text.templates import Turn
from data.tokenizers.tokenizer import Tokenizer

Ids = NDArray[np.int32]
Counts = NDArray[np.int64]


@dataclass
class Encoded:
    """Rows of ids, end to end.

    Args:
        columns: per column the ids of all rows, each row with end of text, and the length of each row.
        uncut: per column the length of each row before it was cut.
        unknown: (rows,) unknown tokens; places: (rows,) which of the rows that came in each of them is.
        empty: blank rows that were left out; dropped: those that cleaning left out.
        text_bytes: UTF-8 of what came in.
    """

    columns: list[tuple[Ids, Counts]]
    uncut: list[Counts]
    unknown: Counts
    places: Counts
    empty: int
    text_bytes: int
    dropped: Dropped = field(default_factory=Dropped)

    @property
    def num_rows(self) -> int:
        """Rows that are left."""
        return len(self.unknown)

    def select(self, rows: NDArray[np.bool_]) -> Encoded:
        """Keep some rows."""
        if rows.all():
            return self
        columns = [(ids[np.repeat(rows, lengths)], lengths[rows]) for ids, lengths in self.columns]
        uncut = [lengths[rows] for lengths in self.uncut]
        return Encoded(columns, uncut, self.unknown[rows], self.places[rows], 0, 0)


@dataclass(frozen=True)
class Encoder:
    """Cleans, words, encodes and cuts batches of rows.

    Args:
        tokenizer: how texts become ids; examples: how rows become texts.
        longest: per column, most tokens with end of text; None: any.
    """

    tokenizer: Tokenizer
    examples: Examples
    longest: tuple[int | None, ...]

    @classmethod
    def load(cls, tokenizer_dir: Path, examples: Examples, longest: tuple[int | None, ...]) -> Encoder:
        """Build the encoder in the process that uses it."""
        return cls(Tokenizer.load(tokenizer_dir), examples, longest)

    def __call__(self, rows: Sequence[Row]) -> Encoded:
        left = self.examples.usable(rows)
        columns, uncut, unknown = [], [], np.zeros(len(left.texts), np.int64)
        for place, longest in enumerate(self.longest):
            sides = self._ids([row[place] for row in left.texts], place)
            uncut.append(_lengths(sides))
            if longest is not None and place == 0:
                sides = [self._shortened(turns, ids, longest) for turns, ids in zip(left.turns, sides, strict=True)]
            lengths = _lengths(sides)
            columns.append(self._ended(sides, lengths, longest))
            if sides and self.tokenizer.unk_id is not None:
                found = np.flatnonzero(np.concatenate(sides) == self.tokenizer.unk_id)
                ends = np.cumsum(lengths - 1)
                unknown += np.bincount(np.searchsorted(ends, found, side="right"), minlength=len(sides))
        size = sum(len(text.encode("utf8", "replace")) for row in rows for text in row)
        return Encoded(columns, uncut, unknown, np.array(left.places, np.int64), left.blank, size, left.dropped)

    def _ids(self, texts: Sequence[str], column: int) -> list[Ids]:
        template = self.examples.template
        if template is None:  # text to pretrain on
            return self.tokenizer.encode_batch(texts)
        return self.tokenizer.encode_prompts(texts, is_chat=column == 0 and bool(template.jinja))

    def _shortened(self, turns: Sequence[Turn], ids: Ids, longest: int) -> Ids:
        """Leave out the oldest turns of a conversation until it fits, or only its newest question is left."""
        if len(ids) < longest or not turns:
            return ids
        shorter = self.examples.shorter_prompts(turns)

        def ids_of(prompt: Callable[[], str]) -> Ids:
            return self._ids([prompt()], 0)[0]

        # the later the fewer tokens, so that a long conversation is encoded a few times, not once for each turn
        fits = bisect_left(shorter, True, key=lambda prompt: len(ids_of(prompt)) < longest)
        return ids_of(shorter[min(fits, len(shorter) - 1)]) if shorter else ids

    def _ended(self, sides: list[Ids], lengths: Counts, longest: int | None) -> tuple[Ids, Counts]:
        """Lay rows end to end, each cut and with end of text."""
        cut = lengths if longest is None else np.minimum(lengths, longest)
        ids = np.full(int(cut.sum()), self.tokenizer.eos_id, np.int32)
        begin = 0
        for row, length in zip(sides, cut.tolist(), strict=True):
            ids[begin : begin + length - 1] = row[: length - 1]
            begin += length
        return ids, cut


def _lengths(sides: list[Ids]) -> Counts:
    """Tokens of each row, with end of text."""
    return np.array([len(ids) + 1 for ids in sides], np.int64)


def longest_of(kind: str, lengths: Lengths) -> tuple[int | None, ...]:
    """Per column of shards of a kind, the most tokens with end of text; None: any."""
    inputs, targets = lengths.input_tokens, lengths.target_tokens
    return {PAIRS: (inputs, targets), PREFERENCES: (inputs, targets, targets)}.get(kind, (None,))
