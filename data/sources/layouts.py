"""Which columns are prompt and response, where a file calls them otherwise? And what is a column made of several?

A column can be written as an expression: `instruction+input` is both texts, one below the other (the second may be missing
in a row), `translation.en` is the text under a key of a cell that holds a table. Files of well-known shapes need no flag:
their columns are recognised by name, and told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from data.text.conversations import check_pair

PAIRS = (
    ("instruction+input", "output"),  # Alpaca, LLaMA-Factory
    ("instruction", "output"),
    ("instruction+input", "response"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("source", "target"),
    ("document", "summary"),
    ("article", "highlights"),
    ("dialogue", "summary"),
    ("input", "output"),
)
TRANSLATION = "translation"  # one column, {"en": ..., "zh": ...}
FEWEST_KEYS = 2


class Optional(str):
    """The name of a column whose cells may be missing or null."""


class Table(str):
    """The name of a column whose cells are tables; read as JSON text."""


def recognised(names: Sequence[str], keys: Sequence[str] = ()) -> tuple[str, str] | None:
    """The columns of prompt and response in a file of these columns; None where its shape is not known.

    Args:
        keys: of the cells of `translation`, in their order.
    """
    for prompt, response in PAIRS:
        if all(name in names for name in (*prompt.split("+"), response)):
            return prompt, response
    if TRANSLATION in names and len(keys) >= FEWEST_KEYS:
        return f"{TRANSLATION}.{keys[0]}", f"{TRANSLATION}.{keys[1]}"
    return None


def widened(pair: tuple[str, str], names: Sequence[str]) -> tuple[str, str]:
    """A recognised pair with the column besides that its first row lacks, where others have it."""
    for prompt, response in PAIRS:
        parts = prompt.split("+")
        if (parts[0], response) == pair and all(part in names for part in parts):
            return prompt, response
    return pair


def stored(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns of a file that such columns are made of, each once; those that are not there as they were asked for."""
    found: dict[str, str] = {}
    for column in columns:
        for part in _parts(column, names):
            if part not in found or isinstance(found[part], Optional):
                found[part] = part
    return list(found.values())


def are_there(columns: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a file has all that such columns are made of."""
    return all(part in names for part in stored(columns, names))


def is_made(columns: Sequence[str], names: Sequence[str]) -> bool:
    """Whether any of these columns is an expression."""
    return any(column not in names and _parts(column, names) != [column] for column in columns)


def check_stored(columns: Sequence[str], row: Sequence[Any]) -> None:
    """`check_pair` of a row as it lies in its file; columns that are made of others are checked when they are made.

    Raises:
        ValueError: names the column.
    """
    if not any(isinstance(name, Optional) for name in columns):
        check_pair(columns, tuple(row))


def made(columns: Sequence[str], names: Sequence[str], row: Sequence[str | None]) -> tuple[str, ...]:
    """The cells of columns from those of `stored`.

    Raises:
        ValueError: a table lacks a key, with what is wrong.
    """
    cells = dict(zip(stored(columns, names), row, strict=True))
    return tuple(_cell(column, names, cells) for column in columns)


def _cell(column: str, names: Sequence[str], cells: dict[str, Any]) -> str:
    parts = _parts(column, names)
    if len(parts) == 1 and isinstance(parts[0], Table):
        key = column.partition(".")[2]
        text = json.loads(cells[parts[0]]).get(key)
        if not isinstance(text, str):
            raise ValueError(f"{parts[0]} has no text under {key}")
        return text
    return (
        "\n".join(text for part in parts if (text := cells[part]) and not text.isspace())
        if len(parts) > 1
        else cells[parts[0]]
    )


def _parts(column: str, names: Sequence[str]) -> list[str]:
    if column in names:
        return [column]
    joined, head = column.split("+"), column.partition(".")[0]
    if len(joined) > 1 and all(name in names for name in joined):
        return [joined[0], *(Optional(name) for name in joined[1:])]
    if head != column and head in names:
        return [Table(head)]
    return [column]


def table_text(cell: object) -> str:
    """Bring a cell that holds a table into one form: JSON text.

    Raises:
        ValueError: it holds something else, with what.
    """
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"holds no table ({error})") from None
    if isinstance(cell, list) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in cell):
        cell = dict(cell)  # a map of Arrow
    if not isinstance(cell, dict):
        raise ValueError(f'holds {"null" if cell is None else type(cell).__name__}, not a table such as {{"en": ...}}')
    text = json.dumps(cell, ensure_ascii=False, default=str)
    text.encode("utf8")  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return text
