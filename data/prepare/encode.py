"""Batches of text rows into batches of id rows: the work that preparing gives to its processes."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.batches.objectives import Lengths
from data.shards.store import PAIRS, PREFERENCES
from data.text.clean import Dropped
from data.text.conversations import Examples, Row, Usable
from data.text.labels import spans_of
from data.text.proteins import ANKH, PREPARATIONS, prepared
from data.text.templates import SYSTEM, USER, Turn
from data.tokenizers.backends import Ids
from data.tokenizers.tokenizer import OVERLAP_CHARS, Tokenizer
from language import say
from settings.consistency import HEADS, TOKEN
from settings.errors import UserError

Counts = NDArray[np.int64]
Labels = NDArray[np.float64]
Column = tuple[Ids | Labels, Counts]  # of all rows end to end, and the length of each
HEAD_CHARS = 16  # for each id that is needed, more than most tokens have; a text of longer tokens is encoded whole
MOST_UNKNOWN_SHARE = 0.2  # of a protein without blanks, ProtT5's tokenizer knows the first letter


@dataclass
class Encoded:
    """Rows of ids, end to end.

    Args:
        columns: per column the ids of all rows, each row with end of text, and the length of each row; of labels the numbers,
            NaN where none is learnt.
        uncut: per column the length of each row before it was cut.
        unknown: (rows,) unknown tokens; places: (rows,) which of the rows that came in each of them is.
        empty: blank rows that were left out; dropped: those that cleaning left out.
        text_bytes: UTF-8 of what came in.
        references: of pairs the ids of all right answers but the first, each with end of text; None: no row has any.
    """

    columns: Sequence[Column]
    uncut: list[Counts]
    unknown: Counts
    places: Counts
    empty: int
    text_bytes: int
    dropped: Dropped = field(default_factory=Dropped)
    references: Column | None = None

    @property
    def num_rows(self) -> int:
        return len(self.unknown)

    def select(self, rows: NDArray[np.bool_]) -> Encoded:
        if rows.all():
            return self
        columns = [_selected(column, rows) for column in self.columns]
        uncut = [lengths[rows] for lengths in self.uncut]
        references = None if self.references is None else _selected(self.references, rows)
        return Encoded(columns, uncut, self.unknown[rows], self.places[rows], 0, 0, references=references)

    def with_references(self) -> list[Column]:
        """The columns, with all right answers of a row one behind the other."""
        if self.references is None:
            return list(self.columns)
        inputs, (ids, lengths) = self.columns
        firsts = np.split(ids, np.cumsum(lengths)[:-1])
        others = np.split(self.references[0], np.cumsum(self.references[1])[:-1])
        answers = [part for pair in zip(firsts, others, strict=True) for part in pair]
        return [inputs, (np.concatenate(answers), lengths + self.references[1])]


def _selected(column: Column, rows: NDArray[np.bool_]) -> Column:
    ids, lengths = column
    return ids[np.repeat(rows, lengths)], lengths[rows]


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
        left, form = self.examples.usable(rows), self.examples.form
        encode = self._labelled if form in HEADS else self._plain
        columns, uncut, unknown = encode(left)
        texts = (row[:1] if form in HEADS else row for row in rows)
        size = sum(len(text.encode("utf8", "replace")) for row in texts for text in row)
        return Encoded(
            columns,
            uncut,
            unknown,
            np.array(left.places, np.int64),
            left.blank,
            size,
            left.dropped,
            self._references(left),
        )

    def _references(self, left: Usable) -> Column | None:
        """The right answers of each row but its first, end to end; None where no row has any."""
        if not any(left.references):
            return None
        rows = list[Ids]()
        for texts in left.references:
            sides = self._ids(texts, 1)
            rows.append(self._ended(sides, _lengths(sides), self.longest[1])[0])
        return _joined(rows)

    def _plain(self, left: Usable) -> tuple[list[Column], list[Counts], Counts]:
        """Columns, their lengths before they were cut, and the unknown tokens of each row."""
        columns, uncut, unknown = list[Column](), list[Counts](), np.zeros(len(left.texts), np.int64)
        for place, longest in enumerate(self.longest):
            sides = self._ids([row[place] for row in left.texts], place)
            uncut.append(_lengths(sides))
            if longest is not None and place == 0:
                sides = [self._shortened(turns, ids, longest) for turns, ids in zip(left.turns, sides, strict=True)]
            lengths = _lengths(sides)
            columns.append(self._ended(sides, lengths, longest))
            unknown += self._unknown(sides)
        return columns, uncut, unknown

    def _labelled(self, left: Usable) -> tuple[list[Column], list[Counts], Counts]:
        """Rows of a text and JSON of its labels; those of letters or words go to the first token of each."""
        texts, labels = [text for text, _ in left.texts], [json.loads(told) for _, told in left.texts]
        encoder, is_token = TextEncoder(self.tokenizer, self.examples.prepare), self.examples.form == TOKEN
        if is_token:
            sides, placed = list[Ids](), list[Labels]()
            for text, told in zip(texts, labels, strict=True):
                ids, firsts = encoder.with_places(text, len(told))
                sides.append(ids)
                placed.append(np.full(len(ids) + 1, np.nan))
                has_token = firsts >= 0
                placed[-1][firsts[has_token]] = np.array(told, float)[has_token]
        else:
            sides, placed = encoder.encode(texts), [np.array(told, float) for told in labels]
        lengths, longest = _lengths(sides), self.longest[0]
        inputs = self._ended(sides, lengths, longest)
        if is_token and longest is not None:  # end of text takes the place of the last letter that is left
            for row in placed:
                row[longest - 1 :] = np.nan
            placed = [row[:longest] for row in placed]
        held = np.array([len(row) for row in placed], np.int64)
        flat = np.concatenate([*placed, np.zeros(0)])
        return [inputs, (flat, held)], [lengths, held], self._unknown(sides)

    def _unknown(self, sides: Sequence[Ids]) -> Counts:
        return np.array([np.count_nonzero(ids == self.tokenizer.unk_id) for ids in sides], np.int64)

    def _ids(self, texts: Sequence[str], column: int) -> list[Ids]:
        template, prepare = self.examples.template, self.examples.prepare
        if template is None:  # text to pretrain on
            if prepare != "none":
                return TextEncoder(self.tokenizer, prepare).encode(texts)
            return self.tokenizer.encode_batch(texts)
        return self.tokenizer.encode_prompts(texts, is_chat=column == 0 and bool(template.jinja))

    def _shortened(self, turns: Sequence[Turn], ids: Ids, longest: int) -> Ids:
        """Leave out the oldest turns of a conversation until it fits, or only its newest question is left; rules stay."""
        template = self.examples.template
        if len(ids) < longest or template is None:
            return ids
        rules = [turn for turn in turns if turn[0] == SYSTEM]
        spoken = [turn for turn in turns if turn[0] != SYSTEM]
        later = [place for place, (role, _) in enumerate(spoken) if role == USER and place]
        if not later:
            return ids

        def ids_from(place: int) -> Ids:
            return self._ids([template.prompt([*rules, *spoken[place:]])], 0)[0]

        # the later the fewer tokens, so that a long conversation is encoded a few times, not once for each turn
        fits = bisect_left(later, True, key=lambda place: len(ids_from(place)) < longest)
        return ids_from(later[min(fits, len(later) - 1)])

    def _ended(self, sides: list[Ids], lengths: Counts, longest: int | None) -> tuple[Ids, Counts]:
        """Lay rows end to end, each cut and with end of text."""
        cut = lengths if longest is None else np.minimum(lengths, longest)
        ids = np.full(int(cut.sum()), self.tokenizer.eos_id, np.int32)
        begin = 0
        for row, length in zip(sides, cut.tolist(), strict=True):
            ids[begin : begin + length - 1] = row[: length - 1]
            begin += length
        return ids, cut


def _joined(parts: Sequence[Ids]) -> tuple[Ids, Counts]:
    return np.concatenate([np.zeros(0, np.int32), *parts]), np.array([len(part) for part in parts], np.int64)


def _lengths(sides: Sequence[Ids]) -> Counts:
    """Tokens of each row, with end of text."""
    return np.array([len(ids) + 1 for ids in sides], np.int64)


@dataclass(frozen=True)
class TextEncoder:
    """Texts for an encoder with a head, or without one: ids without end of text, and where letters and words are among them.

    Args:
        prepare: none, or how the texts of proteins are prepared; see `data.text.proteins`.
    """

    tokenizer: Tokenizer
    prepare: str = "none"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        if self.prepare == ANKH:
            return [self._letter_by_letter(text)[0] for text in texts]
        if self.prepare in PREPARATIONS:
            texts = [prepared(text, self.prepare)[0] for text in texts]
        return self.tokenizer.encode_prompts(texts, is_chat=True)

    def beginning(self, text: str, most: int) -> Ids:
        """The first ids of a text, at most so many. Of a far longer text only the beginning is encoded."""
        head = text[: most * HEAD_CHARS + OVERLAP_CHARS]
        if len(head) < len(text):
            ids = self.encode([head])[0]
            # The ids next to the cut may be others than in the whole text:
            if len(ids) >= most + OVERLAP_CHARS // 2:
                return ids[:most]
        return self.encode([text])[0][:most]

    def with_places(self, text: str, count: int | None = None) -> tuple[Ids, Counts]:
        """Ids of a text, and of each letter or word the place of its first token; -1 where it has none, as a zero-width space.

        A blank that the tokenizer writes as a token of its own is the first token of the word behind it, as in the `word_ids` of
        transformers.

        Args:
            count: how many letters or words it has; None: its words, of a protein its letters.
        Raises:
            UserError: two letters share a token.
        """
        if self.prepare == ANKH:
            return self._letter_by_letter(text)
        if self.prepare in PREPARATIONS:
            text, begins = prepared(text, self.prepare)
            spans = [(begin, begin + 1) for begin in begins]
        else:
            spans = spans_of(text, len(text.split()) if count is None else count)
        ids, ends = self.tokenizer.encode_with_ends(text)
        places = np.searchsorted(ends, np.array([begin for begin, _ in spans], np.int64), side="right")
        next_place = len(ids)
        for at in reversed(range(len(spans))):
            begin, end = spans[at]
            place = int(places[at])
            is_word = text[max(begin - 1, 0) : begin].strip() == "" == text[end : end + 1].strip()
            if is_word and place > 0 and ids[place - 1] == self.tokenizer.blank_id:
                place -= 1
            if place < next_place:
                next_place = places[at] = place
            elif self._is_silent(text[begin:end]):
                places[at] = -1
            else:
                raise UserError(
                    "--label_column: labels of letters need a token for each, and {text!r} has fewer; use "
                    "--tokenizer_type=letters, or for proteins --prepare_text",
                    text=text[begin : begin + 20],
                )
        return ids, places

    def _is_silent(self, word: str) -> bool:
        """Whether a tokenizer makes nothing of a letter or word by itself."""
        unsaid = (*self.tokenizer.backend.prefix_ids, self.tokenizer.blank_id)
        return all(number in unsaid for number in self.tokenizer.encode_with_ends(word)[0])

    def _letter_by_letter(self, text: str) -> tuple[Ids, Counts]:
        letters = "".join(text.split())
        distinct = sorted(set(letters))
        of_letter = dict(zip(distinct, self.tokenizer.encode_batch(distinct, special=True), strict=True))
        pieces = [of_letter[letter] for letter in letters]
        begins = np.cumsum([0, *map(len, pieces)])[:-1]
        return np.concatenate([*pieces, np.zeros(0, np.int32)]), begins.astype(np.int64)


def unknown_warning(unknown: int, tokens: int) -> str | None:
    """What to do where a tokenizer does not know much of a text; None where it does."""
    if unknown <= MOST_UNKNOWN_SHARE * tokens:
        return None
    text = (
        "{share} of the tokens are unknown to the tokenizer; protein sequences need --prepare_text=prott5 (or prostt5, "
        "ankh), other texts another --tokenizer_dir"
    )
    return say(text, share=f"{unknown / tokens:.0%}")


def longest_of(kind: str, lengths: Lengths) -> tuple[int | None, ...]:
    """Per column of shards of a kind, the most tokens with end of text; None: any."""
    inputs, targets = lengths.input_tokens, lengths.target_tokens
    if kind in HEADS:
        return inputs, None
    return {PAIRS: (inputs, targets), PREFERENCES: (inputs, targets, targets)}.get(kind, (None,))
