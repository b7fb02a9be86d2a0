"""Which prompts are in a file, and which columns come with them?

A row keeps all its columns, so that answers can be joined to what they belong to: of JSON lines every value, of CSV every
cell, of Parquet and Arrow what JSON can hold (texts, numbers, truth values). A line of plain text is a prompt. Rows come
one by one, in order, and are numbered, so that a run that was killed can pass over those that are answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from config import DataConfig
from data.sources.arrow_checks import unfolded_bytes
from data.sources.files import TABLES, Source
from data.sources.layouts import Columns
from data.sources.lines import BadRows, decoded_lines, too_long
from data.sources.reading import all_names, column_names, recognised_columns, records
from data.sources.tables import (
    LARGEST_CELL_BYTES,
    broken_file_is_user_error,
    check_types,
    parts,
    record_batches,
    table_columns,
)
from data.text.templates import Turn
from formats import TEXT
from settings.errors import UserError
from settings.fields import is_encodable, listed

PROMPT = "prompt"  # the name of a line of plain text
BATCH_ROWS = 256
Record = dict[str, Any]


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
        rows = _lines(source, bad_rows) if source.kind == TEXT else _prompts(source, data, bad_rows)
        for prompt in rows:
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
            bad_rows.note(source.path, f"row {number}", "is empty, there is nothing to answer")
        yield Prompt(f"{source.path}, row {number}", text, {PROMPT: line})


def _prompts(source: Source, data: DataConfig, bad_rows: BadRows) -> Iterator[Prompt]:
    names = all_names(source)
    columns = _columns_of(source, names, data)
    _refuse_twice(source, column_names(source))
    is_table = source.kind in TABLES
    rows = _table_rows(source, columns, bad_rows) if is_table else records(source, names, bad_rows)
    for place, record in rows:
        try:
            *before, (_, text) = columns.question(record, names)
            if not all(is_encodable(said) for _, said in (*before, ("", text))):
                raise ValueError(f"{columns.sides()[0]} holds half of a surrogate pair")
        except ValueError as error:
            bad_rows.add(source.path, place, str(error))
            before, text = [], ""
        yield Prompt(f"{source.path}, {place}", text, record, before)


def _columns_of(source: Source, names: list[str], data: DataConfig) -> Columns:
    found = recognised_columns(data, "prompts", source)
    if found is None and data.text_column in column_names(source):
        found = Columns((data.text_column,))
    if found is None:
        raise UserError(
            f"{source.path}: has neither {data.prompt_column} nor {data.text_column}; its columns: "
            f"{listed(column_names(source))}; name one with --prompt_column"
        )
    return found


def _refuse_twice(source: Source, names: Sequence[str]) -> None:
    if twice := dict.fromkeys(column for column in names if column.strip() and names.count(column) > 1):
        raise UserError(f"{source.path}: several columns are called {listed(twice)}; give each a name of its own")


def _table_rows(source: Source, columns: Columns, bad_rows: BadRows) -> Iterator[tuple[str, Record]]:
    names = table_columns(source)
    wanted = columns.kinds(names)
    check_types(source, wanted)
    number = 0
    with broken_file_is_user_error(source.path, source.kind):
        for batch in record_batches(source, names, BATCH_ROWS):
            kept = [field.name for field in batch.schema if _fits_json(field.type) or field.name in wanted]
            for part in parts(batch.select(kept)):
                number += part.num_rows
                if sum(map(unfolded_bytes, part.columns)) <= LARGEST_CELL_BYTES:
                    yield from (
                        (f"row {number - part.num_rows + at}", row) for at, row in enumerate(part.to_pylist(), 1)
                    )
                else:
                    bad_rows.add(source.path, f"row {number}", too_long())


def _fits_json(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _fits_json(kind.value_type)
    tests = (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_integer,
        pa.types.is_floating, pa.types.is_boolean, pa.types.is_null,
    )  # fmt: skip
    return any(test(kind) for test in tests)
