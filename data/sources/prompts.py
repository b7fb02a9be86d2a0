"""Prompts of a file, and the columns that come with them.

A row keeps all its columns, so that answers can be joined to what they belong to: of JSON lines every value, of CSV every
cell, of Parquet and Arrow what JSON can hold (texts, numbers, truth values). A line of plain text is a prompt. Rows come
one by one, in order, and are numbered, so that a run that was killed can pass over those that are answered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from childproc import CRASHED, MEMORY, ChildDied, Worker
from data.sources.files import Source
from data.sources.layouts import Columns
from data.sources.lines import BadRows, Record, decoded_lines, place_of
from data.sources.reading import BATCH_ROWS, TOO_LARGE, head_of, reading, records
from data.sources.shapes import prompt_columns
from data.sources.tables import fits_json, type_problems
from data.text.templates import USER, Turn
from formats import TEXT
from language import join, say
from settings.declared import DataConfig
from settings.errors import DoesNotFit, UserError, reason_of, refuse
from settings.fields import is_encodable, listed
from units import MIB, format_size

PROMPT = "prompt"  # the name of a line of plain text
BATCH_BYTES = 1 * MIB


@dataclass(frozen=True)
class Prompt:
    """One row.

    Args:
        place: where it is, for messages. text: the prompt; blank where there is nothing to answer. columns: the whole row, the
            prompt among it. before: the turns before the prompt.
    """

    place: str
    text: str
    columns: Record
    before: Sequence[Turn] = ()

    @property
    def turns(self) -> list[Turn]:
        return [*self.before, (USER, self.text)]

    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        size, waiting = 0, [self.text, self.before, self.columns]
        while waiting:
            value = waiting.pop()
            size += sys.getsizeof(value)
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, (list, tuple)):
                waiting += value
        return size


def prompts_in_child(
    sources: Sequence[Source],
    data: Sequence[DataConfig],
    bad_rows: BadRows,
    max_bytes: int,
    keeps: Sequence[str] | None = None,
) -> Iterator[Prompt]:
    """The same as `read_prompts`, read in a child process: what a file does to a library ends there.

    Args:
        max_bytes: of memory that the child may hold. keeps: as of `read_prompts`.
    Raises:
        UserError, DoesNotFit: also where a file ends that process.
    """
    files = ", ".join(dict.fromkeys(str(source.path) for source in sources))
    try:
        with Worker(_reader, sources, data, bad_rows.skip, keeps, max_bytes=max_bytes) as worker:
            while (answer := worker.ask(None)) is not None:
                prompts, bad_rows.count, bad_rows.examples = answer
                yield from prompts
    except ChildDied as died:
        if died.reason == MEMORY:
            raise DoesNotFit(
                "{files}: reading takes more than {size}; {too_large}",
                files=files,
                size=format_size(max_bytes),
                too_large=TOO_LARGE,
            ) from None
        if died.reason == CRASHED:
            raise UserError(
                "{files}: reading has crashed a library ({died}); fetch or write the file anew", files=files, died=died
            ) from None
        raise


def _reader(
    sources: Sequence[Source], data: Sequence[DataConfig], skip: bool, keeps: Sequence[str] | None
) -> Callable[[None], object]:
    bad_rows = BadRows(skip)
    batches = _batches(read_prompts(sources, data[0], bad_rows, *data[1:], keeps=keeps), bad_rows)
    return lambda _: next(batches, None)


def _batches(prompts: Iterator[Prompt], bad_rows: BadRows) -> Iterator[tuple[list[Prompt], int, list[str]]]:
    """Some prompts, and the number and examples of the bad rows so far; an error comes behind the prompts before it."""
    batch, size = list[Prompt](), 0
    try:
        for prompt in prompts:
            batch.append(prompt)
            size += prompt.num_bytes()
            if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
                yield batch, bad_rows.count, bad_rows.examples
                batch, size = [], 0
    except UserError:
        yield batch, bad_rows.count, bad_rows.examples
        raise
    yield batch, bad_rows.count, bad_rows.examples


def read_prompts(
    sources: Iterable[Source],
    data: DataConfig,
    bad_rows: BadRows,
    *others: DataConfig,
    keeps: Sequence[str] | None = None,
) -> Iterator[Prompt]:
    """Read the prompts of files, in order, so that each row gives one: a blank one where it is bad, or a blank line.

    Args:
        data: which columns hold the prompt; where a file has none of that name, a well-known shape tells, or the column of text.
        bad_rows: told about rows without a prompt, or with one that is empty or no UTF-8. Blank lines are counted, and stop nothing.
        others: tried in their order where a file has none of the columns of `data`. keeps: the columns that come with a prompt, all of
            them if None; what nobody asks for is not held, and of tables not read. A cell of a named one must be text that can be written.
    Raises:
        UserError: a file is broken, or has no such column.
    Memory: one batch of 256 rows.
    """
    for source in sources:
        known = bad_rows.count
        with reading(source):
            for prompt in (
                _lines(source, bad_rows) if source.kind == TEXT else _prompts(source, (data, *others), bad_rows, keeps)
            ):
                is_bad = not prompt.text
                for _ in range(bad_rows.count - known - is_bad):  # rows that could not be read at all
                    yield Prompt(str(source.path), "", {})
                known = bad_rows.count
                yield prompt
        for _ in range(bad_rows.count - known):
            yield Prompt(str(source.path), "", {})


def _lines(source: Source, bad_rows: BadRows) -> Iterator[Prompt]:
    for number, line in enumerate(decoded_lines(source, bad_rows), 1):
        text = line if line.strip() else ""
        if not text:
            bad_rows.note(source.path, say("row {number}", number=number), say("is empty"))
        yield Prompt(say("{path}, row {number}", path=source.path, number=number), text, {PROMPT: line})


def _columns(source: Source, choices: Sequence[DataConfig]) -> Columns | None:
    """The columns of a file's prompts, by the first of the settings whose columns it has; None where it has none."""
    head = head_of(source)
    for data in choices:
        if (columns := prompt_columns(data, head.names, head.sample)) is not None:
            return columns
    return next((Columns((data.text_column,)) for data in choices if data.text_column in head.names), None)


def _prompts(
    source: Source, choices: Sequence[DataConfig], bad_rows: BadRows, keeps: Sequence[str] | None
) -> Iterator[Prompt]:
    head = head_of(source)
    columns = _columns(source, choices)
    if columns is None:
        data = choices[0]
        told = "{file}: has no {names}; its columns: {columns}; name one with --{flag}"
        raise UserError(
            say(
                told,
                file=source.path,
                names=join(" or ", dict.fromkeys([data.prompt_column, data.text_column])),
                columns=listed(head.names),
                flag="text_column" if data.prompt_column == data.text_column else "prompt_column",
            )
        )
    if twice := dict.fromkeys(name for name in head.names if name.strip() and head.names.count(name) > 1):
        told = "{path}: several columns are called {twice}; give each a name of its own"
        raise UserError(say(told, path=source.path, twice=listed(twice)))
    names = head.all_names
    if head.schema is not None:
        wanted = columns.kinds(names)
        refuse(type_problems(source.path, head.schema, wanted))
        names = [field.name for field in head.schema if fits_json(field.type) or field.name in wanted]
    read = names if keeps is None else [name for name in names if name in keeps or name in columns.kinds(names)]
    for number, record in records(source, read, bad_rows):
        place = place_of(source, number)
        try:
            for name, cell in record.items():
                if isinstance(cell, ValueError):
                    raise ValueError(say("{name} {error}", name=name, error=cell))
            *before, (_, text) = columns.question(record, names)
            if not all(is_encodable(said) for _, said in (*before, ("", text))):
                raise ValueError(say("{sides} holds half of a surrogate pair", sides=columns.sides()[0]))
            for name in keeps or ():
                if not is_encodable(str(record.get(name))):
                    raise ValueError(say("{sides} holds half of a surrogate pair", sides=name))
                if "\0" in str(record.get(name)):
                    raise ValueError(say("{name} holds a NUL character", name=name))
        except ValueError as error:
            bad_rows.add(source.path, place, reason_of(error))
            record = {name: None if isinstance(cell, ValueError) else cell for name, cell in record.items()}
            before, text = [], ""
        if keeps is not None:
            record = {name: record[name] for name in keeps if name in record}
        yield Prompt(say("{path}, {place}", path=source.path, place=place), text, record, before)
