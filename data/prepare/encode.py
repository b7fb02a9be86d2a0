"""Batches of text rows into batches of id rows: the work that preparing gives to its processes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.progress import text_bytes
from data.task import RowLimits
from data.text.clean import Dropped
from data.text.conversations import Examples, TextRow, Usable
from data.text.labels import spans_of
from data.text.proteins import ANKH, PREPARATIONS, prepared
from data.text.templates import SYSTEM, USER, Template, Turn
from data.tokenizers.backends import Ids
from data.tokenizers.tokenizer import OVERLAP_CHARS, Tokenizer
from settings.errors import UserError
from settings.tasks import task_named
from support.language import say

Counts = NDArray[np.int64]
Labels = NDArray[np.float64]
Column = tuple[Ids | Labels, Counts]  # of all rows end to end, and the length of each
# So many letters for each id that is needed, more than most tokens have; a text of longer tokens is encoded whole.
HEAD_CHARS = 16
MOST_UNKNOWN_SHARE = 0.2  # Of a protein without blanks, ProtT5's tokenizer knows the first letter.


@dataclass
class Encoded:
    """Rows of ids, end to end.

    Args:
        columns: per column the ids of all rows, each row with end of text, and the length of each row; of labels the
            numbers, NaN where none is learnt.
        uncut: per column the length of each row before it was cut.
        unknown: (rows,) unknown tokens; row_indices: (rows,) which of the rows that came in each of them is.
        empty: blank rows that were left out; dropped: those that cleaning left out.
        text_bytes: UTF-8 of what came in.
        references: of pairs the ids of all right answers but the first, each with end of text; None: no row has any.
        row_texts: (rows,) texts of each row where the first column holds several; None: each row is one text.
    """

    columns: Sequence[Column]
    uncut: list[Counts]
    unknown: Counts
    row_indices: Counts
    empty: int
    text_bytes: int
    dropped: Dropped = field(default_factory=Dropped)
    references: Column | None = None
    row_texts: Counts | None = None

    @property
    def num_texts(self) -> int:
        return self.num_rows if self.row_texts is None else int(self.row_texts.sum())

    @property
    def num_rows(self) -> int:
        return len(self.unknown)

    def select(self, rows: NDArray[np.bool_]) -> Encoded:
        if rows.all():
            return self
        return Encoded(
            columns=[_selected(column, rows) for column in self.columns],
            uncut=[lengths[rows] for lengths in self.uncut],
            unknown=self.unknown[rows],
            row_indices=self.row_indices[rows],
            empty=0,
            text_bytes=0,
            references=None if self.references is None else _selected(self.references, rows),
            row_texts=None if self.row_texts is None else self.row_texts[rows],
        )

    def with_references(self) -> list[Column]:
        """The columns, with all right answers of a row one behind the other."""
        if self.references is None:
            return list(self.columns)
        inputs, (ids, lengths) = self.columns
        more_ids, more_lengths = self.references
        firsts = np.split(ids, np.cumsum(lengths)[:-1])
        further = np.split(more_ids, np.cumsum(more_lengths)[:-1])
        answers = np.concatenate(list(chain.from_iterable(zip(firsts, further, strict=True))))
        return [inputs, (answers, lengths + more_lengths)]


def _selected(column: Column, rows: NDArray[np.bool_]) -> Column:
    ids, lengths = column
    return ids[np.repeat(rows, lengths)], lengths[rows]


@dataclass(frozen=True)
class Encoder:
    """Cleans, words, encodes and cuts batches of rows.

    Args:
        tokenizer: how texts become ids. examples: how rows become texts. limits: to which each column is cut.
    """

    tokenizer: Tokenizer
    examples: Examples
    limits: RowLimits

    def __call__(self, rows: Sequence[TextRow]) -> Encoded:
        usable = self.examples.usable(rows)
        columns, uncut, unknown = self.encode(usable)
        references: Column | None = None
        if any(usable.references):
            answers = [self._ids(texts, 1) for texts in usable.references]
            ended = [self.ended(ids, lengths_of_rows(ids), self.limits[1])[0] for ids in answers]
            references = np.concatenate(ended), np.array(list(map(len, ended)), np.int64)
        return Encoded(
            columns,
            uncut,
            unknown,
            np.array(usable.row_numbers, np.int64),
            usable.blank,
            text_bytes(rows),
            usable.dropped,
            references,
        )

    def encode(self, usable: Usable) -> tuple[list[Column], list[Counts], Counts]:
        """Columns, their lengths before they were cut, and the unknown tokens of each row."""
        columns = list[Column]()
        uncut = list[Counts]()
        unknown = np.zeros(len(usable.texts), np.int64)
        for column, limit in enumerate(self.limits):
            sides = self._ids([row[column] for row in usable.texts], column)
            uncut.append(lengths_of_rows(sides))
            if column == 0:
                sides = [self._shortened(turns, ids, limit) for turns, ids in zip(usable.turns, sides, strict=True)]
            columns.append(self.ended(sides, lengths_of_rows(sides), limit))
            unknown += self.unknown(sides)
        return columns, uncut, unknown

    def unknown(self, sides: Sequence[Ids]) -> Counts:
        """Unknown tokens of each row."""
        return np.array([np.count_nonzero(ids == self.tokenizer.unk_id) for ids in sides], np.int64)

    def _ids(self, texts: Sequence[str], column: int) -> list[Ids]:
        template = self.examples.template
        if template is not None:
            return self.tokenizer.encode_prompts(texts, is_chat=column == 0 and bool(template.jinja))
        # Text to pretrain on:
        if self.examples.prepare != "none":
            return TextEncoder(self.tokenizer, self.examples.prepare).encode(texts)
        return self.tokenizer.encode_batch(texts)

    def _shortened(self, turns: Sequence[Turn], ids: Ids, longest: int | None) -> Ids:
        """Leave out the oldest turns of a conversation until it fits, or only its newest question is left; rules
        stay. Of a prompt that ends as all others do, the tokens before that end are left out.
        """
        template = self.examples.template
        if template is None or longest is None or len(ids) < longest:
            return ids
        if self.examples.ending:
            return cut_before_end(ids, longest, ending_tokens(self.tokenizer, template, self.examples.ending))
        rules = [turn for turn in turns if turn[0] == SYSTEM]
        spoken = [turn for turn in turns if turn[0] != SYSTEM]
        later = [number for number, (role, _) in enumerate(spoken) if role == USER and number]
        if not later:
            return ids

        def ids_from(number: int) -> Ids:
            return self._ids([template.prompt([*rules, *spoken[number:]])], 0)[0]

        # The later the fewer tokens, so that a long conversation is encoded a few times, not once for each turn.
        fits = bisect_left(later, True, key=lambda number: len(ids_from(number)) < longest)
        return ids_from(later[min(fits, len(later) - 1)])

    def ended(self, sides: Sequence[Ids], lengths: Counts, longest: int | None) -> tuple[Ids, Counts]:
        """Lay rows end to end, each cut and with end of text."""
        cut = lengths if longest is None else np.minimum(lengths, longest)
        ids = np.full(int(cut.sum()), self.tokenizer.eos_id, np.int32)
        begin = 0
        for row, length in zip(sides, cut.tolist(), strict=True):
            ids[begin : begin + length - 1] = row[: length - 1]
            begin += length
        return ids, cut


def ending_tokens(tokenizer: Tokenizer, template: Template, ending: str) -> int:
    """Tokens of the text that every prompt ends with, and of what a template has behind it."""
    _, after = template.text_around_question()
    return len(tokenizer.encode_prompts([ending + after], is_chat=bool(template.jinja))[0])


def cut_before_end(ids: Ids, longest: int, kept: int) -> Ids:
    """Ids of a prompt, without end of text, of which the last ones stay: at most `longest` - 1.

    Args:
        kept: how many stay at the end.
    """
    if len(ids) < longest:
        return ids
    kept = min(kept, longest - 1)
    return np.concatenate([ids[: longest - 1 - kept], ids[len(ids) - kept :]])


def lengths_of_rows(sides: Sequence[Ids]) -> Counts:
    """Tokens of each row, with end of text."""
    return np.array([len(ids) + 1 for ids in sides], np.int64)


@dataclass(frozen=True)
class TextEncoder:
    """Texts for an encoder with a head, or without one: ids without end of text, and where letters and words are among
    them.

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
        """Ids of a text, and of each letter or word the place of its first token; -1 where it has none, as a zero-width
        space.

        A blank that the tokenizer writes as a token of its own is the first token of the word behind it, as in the
        `word_ids` of transformers.

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
        first_tokens = np.searchsorted(ends, np.array([begin for begin, _ in spans], np.int64), side="right")
        next_token = len(ids)
        for number in reversed(range(len(spans))):
            begin, end = spans[number]
            token = int(first_tokens[number])
            is_word = text[max(begin - 1, 0) : begin].strip() == "" == text[end : end + 1].strip()
            if is_word and token > 0 and ids[token - 1] == self.tokenizer.blank_id:
                token -= 1
            if token < next_token:
                first_tokens[number] = token
                next_token = token
            elif self._is_silent(text[begin:end]):
                first_tokens[number] = -1
            else:
                raise UserError(
                    "--label_column: labels of letters need a token for each, and {text!r} has fewer; use "
                    "--tokenizer_type=letters, or for proteins --prepare_text",
                    text=text[begin : begin + 20],
                )
        return ids, first_tokens

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


def load_encoder(objective: str, tokenizer_dir: Path, examples: Examples, limits: RowLimits) -> Encoder:
    """The encoder of a task, built in the process that uses it."""
    encoder: Encoder = task_named(objective).encoder(Tokenizer.load(tokenizer_dir), examples, limits)
    return encoder
