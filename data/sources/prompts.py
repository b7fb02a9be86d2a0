"""Prompts of a file, and the columns that come with them.

A row keeps all its columns, so that answers can be joined to what they belong to: of JSON lines every value, of CSV every
cell, of Parquet and Arrow what JSON can hold (texts, numbers, truth values). A line of plain text is a prompt. Rows come
one by one, in order, and are numbered, so that a run that was killed can pass over those that are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from childproc import CRASHED, MEMORY, ChildDied, Worker
from data.sources.files import Source
from data.sources.layouts import Columns
from data.sources.lines import BadRows, Record, decoded_lines, place_of
from data.sources.reading import (
    BATCH_CHARS,
    BATCH_ROWS,
    TOO_LARGE,
    head_of,
    reading,
    recognised_columns,
    records,
)
from data.sources.tables import fits_json, type_problems
from data.text.templates import USER, Turn
from formats import TEXT
from language import join, say
from settings.declared import DataConfig
from settings.errors import DoesNotFit, UserError, reason_of, refuse
from settings.fields import is_encodable, listed
from units import MIB, format_size

PROMPT = "prompt"  # the name of a line of plain text
CHILD_BYTES = 512 * MIB  # sound files take less


@dataclass(frozen=True)
class Prompt:
    """One row.

    Args:
        place: where it is, for messages. text: the prompt; blank where there is nothing to answer. columns: the whole row, the
            prompt among it. before: the turns before the prompt. is_history: whether these and the prompt are items of a history.
    """

    place: str
    text: str
    columns: Record
    before: Sequence[Turn] = ()
    is_history: bool = False

    @property
    def turns(self) -> list[Turn]:
        return [*self.before, (USER, self.text)]


def prompts_in_child(sources: Sequence[Source], data: DataConfig, bad_rows: BadRows) -> Iterator[Prompt]:
    """The same as `read_prompts`, read in a child process: what a file does to a library ends there.

    Raises:
        UserError, DoesNotFit: also where a file ends that process.
    """
    files = ", ".join(dict.fromkeys(str(source.path) for source in sources))
    try:
        with Worker(_reader, sources, data, bad_rows.skip, max_bytes=CHILD_BYTES) as worker:
            while (answer := worker.ask(None)) is not None:
                prompts, bad_rows.count, bad_rows.examples = answer
                yield from prompts
    except ChildDied as died:
        if died.reason == MEMORY:
            raise DoesNotFit(
                "{files}: reading takes more than {size}; {too_large}",
                files=files,
                size=format_size(CHILD_BYTES),
                too_large=TOO_LARGE,
            ) from None
        if died.reason == CRASHED:
            raise UserError(
                "{files}: reading has crashed a library ({died}); fetch or write the file anew", files=files, died=died
            ) from None
        raise


def _reader(sources: Sequence[Source], data: DataConfig, skip: bool) -> Callable[[None], object]:
    batches = _batches(sources, data, BadRows(skip))
    return lambda _: next(batches, None)


def _batches(
    sources: Sequence[Source], data: DataConfig, bad_rows: BadRows
) -> Iterator[tuple[list[Prompt], int, list[str]]]:
    """Some prompts, and the number and examples of the bad rows so far; an error comes behind the prompts before it."""
    batch, chars = list[Prompt](), 0
    try:
        for prompt in read_prompts(sources, data, bad_rows):
            batch.append(prompt)
            chars += len(prompt.text)
            if len(batch) == BATCH_ROWS or chars >= BATCH_CHARS:
                yield batch, bad_rows.count, bad_rows.examples
                batch, chars = [], 0
    except UserError:
        yield batch, bad_rows.count, bad_rows.examples
        raise
    yield batch, bad_rows.count, bad_rows.examples


def read_prompts(sources: Iterable[Source], data: DataConfig, bad_rows: BadRows) -> Iterator[Prompt]:
    """Read the prompts of files, in order, so that each row gives one: a blank one where it is bad, or a blank line.

    Args:
        data: which columns hold the prompt; where a file has none of that name, a well-known shape tells, or the column of text.
        bad_rows: told about rows without a prompt, or with one that is empty or no UTF-8. Blank lines are counted, and stop nothing.
    Raises:
        UserError: a file is broken, or has no such column.
    Memory: one batch of 256 rows.
    """
    for source in sources:
        known = bad_rows.count
        with reading(source):
            for prompt in _lines(source, bad_rows) if source.kind == TEXT else _prompts(source, data, bad_rows):
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


def _prompts(source: Source, data: DataConfig, bad_rows: BadRows) -> Iterator[Prompt]:
    head = head_of(source)
    columns = recognised_columns(data, "prompts", source)
    if columns is None and data.text_column in head.names:
        columns = Columns((data.text_column,))
    if columns is None:
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
    for number, record in records(source, names, bad_rows):
        place = place_of(source, number)
        try:
            for name, cell in record.items():
                if isinstance(cell, ValueError):
                    raise ValueError(say("{name} {error}", name=name, error=cell))
            *before, (_, text) = columns.question(record, names)
            if not all(is_encodable(said) for _, said in (*before, ("", text))):
                raise ValueError(say("{sides} holds half of a surrogate pair", sides=columns.sides()[0]))
        except ValueError as error:
            bad_rows.add(source.path, place, reason_of(error))
            record = {name: None if isinstance(cell, ValueError) else cell for name, cell in record.items()}
            before, text = [], ""
        yield Prompt(say("{path}, {place}", path=source.path, place=place), text, record, before, bool(columns.items))
