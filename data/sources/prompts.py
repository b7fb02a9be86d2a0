"""Prompts of a file, and the columns that come with them.

A row keeps all its columns, so that answers can be joined to what they belong to: of JSON lines every value, of CSV
every cell, of Parquet and Arrow what JSON can hold (texts, numbers, truth values). A line of plain text is a prompt.
Rows come one by one, in order, and are numbered, so that a run that was killed can pass over those that are answered.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

from data.sources.columns import Columns
from data.sources.formats import TEXT
from data.sources.layouts import PROMPTS, recognise
from data.sources.lines import BadRows, Record, batches, decoded_lines, place_of
from data.sources.reading import (
    BATCH_ROWS,
    check_types,
    head_of,
    reading,
    reading_in_child,
    records,
)
from data.sources.source import Source
from data.text.cells import list_in
from data.text.labels import joined_words
from data.text.templates import USER, Turn
from settings.declared import DataConfig
from settings.errors import UserError, reason_of
from settings.fields import is_encodable, listed
from support.child_process import Worker
from support.language import join, say
from support.units import MIB

PROMPT = "prompt"  # the name of a line of plain text
BATCH_BYTES = 1 * MIB
Row = TypeVar("Row")
JSON_TYPES = (str, int, bool)  # of sample cells, such as JSON has; integers stand for all numbers but decimals


@dataclass(frozen=True)
class Prompt:
    """One row.

    Args:
        origin: its file and row, for messages.
        text: the prompt; blank where there is nothing to answer.
        columns: the whole row, the prompt among it.
        before: the turns before the prompt.
        words: how many words the text was joined of; None: it is a text.
    """

    origin: str
    text: str
    columns: Record
    before: Sequence[Turn] = ()
    words: int | None = None

    @property
    def turns(self) -> list[Turn]:
        return [*self.before, (USER, self.text)]

    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        return sys.getsizeof(self.columns) + len(repr((self.text, self.before, self.columns)))


def prompts_in_child(
    sources: Sequence[Source],
    data: Sequence[DataConfig],
    bad_rows: BadRows,
    max_bytes: int,
    keeps: Sequence[str] | None = None,
    splits_lists: bool = False,
) -> Iterator[Prompt]:
    """The same as `read_prompts`, read in a child process; raises as `read_in_child`.

    Args:
        max_bytes: of memory that the child may hold. keeps, splits_lists: as of `read_prompts`.
    """
    read = partial(_read, sources=sources, data=data, keeps=keeps, splits_lists=splits_lists)
    return read_in_child(sources, read, Prompt.num_bytes, bad_rows, max_bytes)


def _read(
    bad_rows: BadRows,
    sources: Sequence[Source],
    data: Sequence[DataConfig],
    keeps: Sequence[str] | None,
    splits_lists: bool,
) -> Iterator[Prompt]:
    return read_prompts(sources, data[0], bad_rows, *data[1:], keeps=keeps, splits_lists=splits_lists)


def read_in_child(
    sources: Sequence[Source],
    read: Callable[[BadRows], Iterator[Row]],
    num_bytes: Callable[[Row], int],
    bad_rows: BadRows,
    max_bytes: int,
) -> Iterator[Row]:
    """Rows of files, read in a child process: what a file does to a library ends there.

    Args:
        read: gives the rows, and is told where broken ones go. num_bytes: of memory that a row takes, about.
        max_bytes: of memory that the child may hold.
    Raises:
        UserError, DoesNotFit: of `read`, and where a file ends that process.
    """
    files = ", ".join(dict.fromkeys(str(source.path) for source in sources))
    with (
        reading_in_child(files, max_bytes),
        Worker(_reader, read, num_bytes, bad_rows.skip, max_bytes=max_bytes) as worker,
    ):
        while True:
            rows, bad_rows.count, bad_rows.examples = worker.ask(None)
            if not rows:
                return
            yield from rows


def _reader(
    read: Callable[[BadRows], Iterator[Row]], num_bytes: Callable[[Row], int], skip: bool
) -> Callable[[None], object]:
    """What gives some rows, with the number and examples of the bad ones so far; none at the end.

    An error comes behind the rows before it.
    """
    bad_rows = BadRows(skip)
    errors: list[UserError] = []

    def until_error() -> Iterator[Row]:
        try:
            yield from read(bad_rows)
        except UserError as error:
            errors.append(error)

    row_batches = batches(until_error(), BATCH_BYTES, num_bytes, BATCH_ROWS)

    def next_batch(_: None) -> tuple[list[Row], int, list[str]]:
        batch = next(row_batches, [])
        if errors and not batch:
            raise errors[0]
        return batch, bad_rows.count, bad_rows.examples

    return next_batch


def read_prompts(
    sources: Iterable[Source],
    data: DataConfig,
    bad_rows: BadRows,
    *others: DataConfig,
    keeps: Sequence[str] | None = None,
    splits_lists: bool = False,
) -> Iterator[Prompt]:
    """Read the prompts of files, in order, so that each row gives one: a blank one where it is bad, or a blank line.

    Args:
        data: which columns hold the prompt; where a file has none of that name, a well-known shape tells, or the column
            of text.
        bad_rows: told about rows without a prompt, or with one that is empty or no UTF-8. Blank lines are counted, and
            stop nothing.
        others: tried in their order where a file has none of the columns of `data`. keeps: the columns that come with a
            prompt, all of them if None; what nobody asks for is not held, and of tables not read. A cell of a named one
            must be text that can be written.
        splits_lists: whether each text of a list is a prompt; else a list is one text of several words.
    Raises:
        UserError: a file is broken, or has no such column.
    Memory: one batch of 256 rows.
    """
    for source in sources:
        bad_before = bad_rows.count
        with reading(source):
            prompts = _lines(source, bad_rows)
            if source.kind != TEXT:
                prompts = _prompts(source, (data, *others), bad_rows, keeps, splits_lists)
            for prompt in prompts:
                unreadable = bad_rows.count - bad_before - (not prompt.text)
                yield from [Prompt(str(source.path), "", {})] * unreadable
                bad_before = bad_rows.count
                yield prompt
        yield from [Prompt(str(source.path), "", {})] * (bad_rows.count - bad_before)


def _lines(source: Source, bad_rows: BadRows) -> Iterator[Prompt]:
    for number, line in enumerate(decoded_lines(source, bad_rows), 1):
        text = line
        if not line.strip():
            text = ""
            bad_rows.note(source.path, say("row {number}", number=number), say("is empty"))
        yield Prompt(say("{path}, row {number}", path=source.path, number=number), text, {PROMPT: line})


def _columns(source: Source, choices: Sequence[DataConfig]) -> Columns:
    """The columns of a file's prompts, by the first of the settings whose columns it has.

    Raises:
        UserError: it has none of them, or several that are called alike.
    """
    head = head_of(source)
    layouts = (recognise(data, head, PROMPTS) for data in choices)
    texts = (Columns((data.text_column,)) for data in choices if data.text_column in head.names)
    columns = next(filter(None, chain(layouts, texts)), None)
    if columns is None:
        expected = list(dict.fromkeys([choices[0].prompt_column, choices[0].text_column]))
        raise UserError(
            "{file}: has no {names}; its columns: {columns}; name one with --{flag}",
            file=source.path,
            names=join(" or ", expected),
            columns=listed(head.names),
            flag="text_column" if len(expected) == 1 else "prompt_column",
        )
    twice = [name for name, count in Counter(filter(str.strip, head.names)).items() if count > 1]
    if twice:
        raise UserError(
            "{path}: several columns are called {twice}; give each a name of its own",
            path=source.path,
            twice=listed(twice),
        )
    return columns


def _prompts(
    source: Source,
    choices: Sequence[DataConfig],
    bad_rows: BadRows,
    keeps: Sequence[str] | None,
    splits_lists: bool,
) -> Iterator[Prompt]:
    columns = _columns(source, choices)
    head = head_of(source)
    # Who reads texts, and no prompts, names one column for both. A text may be a list of words.
    is_of_texts = choices[0].text_column == choices[0].prompt_column
    word_column = columns.texts[0] if is_of_texts and columns.texts else ""
    if not (splits_lists and isinstance(head.sample.get(word_column), list)):
        check_types(source, columns)
    # A column that comes with a prompt is read where JSON can hold it.
    no_json = {name for name in head.types if not fits_json(head.sample[name])}
    read = ({*head.all_names} if keeps is None else {*keeps}) - no_json | columns.kinds(head.all_names).keys()
    names = [name for name in head.all_names if name in read]
    question_of = columns.question_of(names)
    for number, record in records(source, names, bad_rows):
        broken = {name: cell for name, cell in record.items() if isinstance(cell, ValueError)}
        record = {**record, **dict.fromkeys(broken)}
        kept = record if keeps is None else {name: record[name] for name in keeps if name in record}
        origin = say("{path}, {place}", path=source.path, place=place_of(source, number))
        try:
            for name, error in broken.items():
                raise ValueError(say("{name} {error}", name=name, error=error))
            for name in keeps or ():
                text = str(record.get(name))
                _check_encodable(name, text)
                if "\0" in text:
                    raise ValueError(say("{name} holds a NUL character", name=name))
            cells = [record.get(word_column)]
            if splits_lists:
                cells = _texts_in(cells[0], word_column)
            asked = list[tuple[list[Turn], int | None]]()
            for cell in cells:
                joined = cell if splits_lists else joined_words(cell)
                turns = question_of(record if joined is record.get(word_column) else {**record, word_column: joined})
                _check_encodable(columns.sides()[0], "".join(text for _, text in turns))
                asked.append((turns, None if joined is cell else len(turns[-1][1].split())))
        except ValueError as error:
            bad_rows.add(source, number, reason_of(error))
            asked = [([(USER, "")], None)]
        for turns, words in asked:
            yield Prompt(origin, turns[-1][1], kept, turns[:-1], words)


def _texts_in(cell: object, name: str) -> list[object]:
    """The texts of a list, which CSV has as JSON, or what else a cell is.

    Raises:
        ValueError: the list is empty.
    """
    texts = list_in(cell) if isinstance(cell, str) else cell
    if texts == []:
        raise ValueError(say("{column} is empty", column=name))
    return texts if isinstance(texts, list) else [cell]


def fits_json(sample: object) -> bool:
    """Whether cells like this one of a table may stand in JSON: plain ones, and lists of texts."""
    is_list_of_texts = isinstance(sample, list) and bool(sample) and all(isinstance(each, str) for each in sample)
    return type(sample) in JSON_TYPES or is_list_of_texts


def _check_encodable(name: str, text: str) -> None:
    if not is_encodable(text):
        raise ValueError(say("{sides} holds half of a surrogate pair", sides=name))
