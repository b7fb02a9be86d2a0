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

from data.sources.arrow_checks import unfolded_bytes
from data.sources.files import OBJECTS, TABLES, Source
from data.sources.json_rows import objects
from data.sources.layouts import Table, is_made, made, stored, table_text
from data.sources.lines import BadRows, too_long
from data.sources.reading import all_names, column_names, read_source, recognised_columns
from data.sources.tables import (
    LARGEST_CELL_BYTES,
    broken_file_is_user_error,
    check_types,
    parts,
    record_batches,
    table_columns,
)
from formats import TEXT
from settings.fields import UserError, is_encodable, listed

PROMPT = "prompt"  # the name of a line of plain text
BATCH_ROWS = 256
Columns = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One row.

    Args:
        place: where it is, for messages. text: the prompt. columns: the whole row, the prompt among it.
    """

    place: str
    text: str
    columns: Columns


def read_prompts(sources: Iterable[Source], column: str, other: str, bad_rows: BadRows) -> Iterator[Prompt]:
    """Read the prompts of files, in order.

    Args:
        column: which holds the prompt; where a file has none of that name, `other`.
        bad_rows: told about rows without a prompt, or with one that is empty or no UTF-8.
    Raises:
        UserError: a file is broken, or has neither column.
    Memory: one batch of 256 rows.
    """
    for source in sources:
        names = [PROMPT] if source.kind == TEXT else all_names(source)
        name = PROMPT if source.kind == TEXT else _column_of(source, names, column, other)
        for place, columns in _rows(source, name, bad_rows):
            text = columns.get(name) if name in columns else _made(name, columns, names)
            if not isinstance(text, str):
                bad_rows.add(source.path, place, f"has no text in {name}")
            elif not text.strip():
                bad_rows.add(source.path, place, f"{name} is empty, there is nothing to answer")
            elif not is_encodable(text):
                bad_rows.add(source.path, place, f"{name} holds half of a surrogate pair")
            else:
                yield Prompt(f"{source.path}, {place}", text, columns)


def _column_of(source: Source, names: list[str], column: str, other: str) -> str:
    first = column_names(source)  # of objects: what only some have tells no shape, where nobody has named it
    there = ((column, first if column == PROMPT else names), (other, first))
    found = next((name for name, known in there if name in known or is_made([name], names)), None)
    if found is None and (known := recognised_columns(source)) is not None:
        found = known[0]
    if found is None:
        raise UserError(
            f"{source.path}: has neither {column} nor {other}; its columns: {listed(first)}; name one with --prompt_column"
        )
    return found


def _made(expression: str, columns: Columns, of_file: list[str]) -> str | None:
    """The text of a column that is made of others; None where it has none.

    Args:
        of_file: the columns of its file, of which a row may lack some.
    """
    names = list(dict.fromkeys([*columns, *of_file]))
    try:
        cells = [
            table_text(columns[name]) if isinstance(name, Table) else columns.get(name)
            for name in stored([expression], names)
        ]
        return made([expression], names, cells)[0]
    except (KeyError, ValueError):
        return None


def _rows(source: Source, name: str, bad_rows: BadRows) -> Iterator[tuple[str, Columns]]:
    """Every row with its place."""
    if source.kind in OBJECTS:
        return objects(source, bad_rows)
    if source.kind in TABLES:
        return _table_rows(source, name, bad_rows)
    names = [PROMPT] if source.kind == TEXT else column_names(source)
    _refuse_twice(source, names)
    batches = read_source(source, names, bad_rows, text_unit="line")
    rows = (row for batch in batches for row in batch)
    return ((f"row {number}", dict(zip(names, row, strict=True))) for number, row in enumerate(rows, 1))


def _refuse_twice(source: Source, names: Sequence[str]) -> None:
    if twice := dict.fromkeys(column for column in names if column.strip() and names.count(column) > 1):
        raise UserError(f"{source.path}: several columns are called {listed(twice)}; give each a name of its own")


def _table_rows(source: Source, name: str, bad_rows: BadRows) -> Iterator[tuple[str, Columns]]:
    names = table_columns(source)
    _refuse_twice(source, names)
    check_types(source, stored([name], names))
    number = 0
    with broken_file_is_user_error(source.path, source.kind):
        for batch in record_batches(source, names, BATCH_ROWS):
            kept = [
                field.name for field in batch.schema if _fits_json(field.type) or field.name in stored([name], names)
            ]
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
