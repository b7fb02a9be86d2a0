"""Texts of a row: a column, a key in its tables, or several of them.

A column can be written as an expression: `instruction+input` is both texts, one below the other (the second may be
missing in a row), `prefix: input_text` both in one line, `translation.en` the text under a key of a cell that holds a
table. A list of texts in a response, or under its key, holds several right answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from typing import Any

from data.text.cells import parsed
from data.text.conversations import turns_of
from data.text.templates import Turn
from language import say
from settings.fields import listed

TEXT, NUMBER, TURNS, TABLE = "text", "number", "turns", "table"  # what a cell may hold


@dataclass(frozen=True)
class Expression:
    """One text of a row as one file has it.

    Args:
        parts: columns, and of each a key in its tables or none.
        joint: what stands between several parts.
        needed: the part that every row must have.
        also: what its cells may hold besides text: NUMBER, such as a label or a score, or TURNS.
    """

    parts: Sequence[tuple[str, str]]
    joint: str = ""
    needed: int = 0
    also: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, expression: str, names: Sequence[str], may_lack: bool = False, also: frozenset[str] = frozenset()
    ) -> Expression:
        """Read an expression for a file with these columns.

        Args:
            may_lack: whether parts that the file has not are left out, but for the one that is needed.
        """
        for sign, joint, needed in (("+", "\n", 0), (": ", ": ", -1)) if expression not in names else ():
            pieces = expression.split(sign)
            known = [piece for piece in pieces if piece in names or piece.partition(".")[0] in names]
            if len(pieces) > 1 and (known == pieces or (may_lack and pieces[needed] in known)):
                return cls([keyed(piece, names) for piece in known], joint, needed, also)
        return cls([keyed(expression, names)], also=also)

    def read(self, record: Mapping[str, Any]) -> str | list[Turn]:
        """The text of a record, or its turns; raises ValueError where it has none."""
        if len(self.parts) == 1:
            column, key = self.parts[0]
            if TURNS in self.also and not key and isinstance(record.get(column), (list, dict)):
                return turns_in_cell(record, column)
            return text_of(record, column, key, NUMBER in self.also)
        needed = self.parts[self.needed]
        present = [part for part in self.parts if part == needed or record.get(part[0]) is not None]
        texts = [text_of(record, column, key, NUMBER in self.also) for column, key in present]
        return self.joint.join(text for text in texts if text.strip())

    def answers(self, record: Mapping[str, Any]) -> list[str]:
        """The right answers of a record, each once; raises ValueError where it has none."""
        column, key = self.parts[0]
        entries = record.get(column)
        if key and isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
            entries = [entry.get(key) for entry in entries]
        else:
            entries = _value(record, column, key)
        if not isinstance(entries, list):
            return [text_of(record, column, key, NUMBER in self.also)]
        texts = [_as_text(entry, column, "", NUMBER in self.also) for entry in entries]
        answers = list(dict.fromkeys(filter(str.strip, texts)))
        if answers:
            return answers
        if key:
            raise ValueError(say("{column} has no text under {key}", column=column, key=key))
        raise ValueError(say("{column} is empty", column=column))


def keyed(expression: str, names: Sequence[str]) -> tuple[str, str]:
    """The column of a simple expression, and a key in its tables or none."""
    column, _, key = expression.partition(".")
    return (column, key) if key and expression not in names and column in names else (expression, "")


def text_of(record: Mapping[str, Any], column: str, key: str = "", may_count: bool = False) -> str:
    """The text of a cell, or under a key of a cell with a table.

    Args:
        may_count: whether a number is read as its digits.
    Raises:
        ValueError: with what is wrong.
    """
    value = _value(record, column, key)
    if key and isinstance(value, list) and value:
        value = value[0]
    return _as_text(value, column, key, may_count)


def turns_in_cell(record: Mapping[str, Any], column: str) -> list[Turn]:
    """The turns of a cell; raises ValueError with what is wrong."""
    cell = _value(record, column)
    try:
        return turns_of(cell)
    except ValueError as error:
        raise ValueError(say("{name} {error}", name=column, error=error)) from None


def cell_of(record: Mapping[str, Any], column: str) -> Any:
    """A cell as a file has it; raises ValueError where the record has no such column."""
    if column not in record:
        raise ValueError(say("has no {name}; it has {value}", name=column, value=listed(record) or say("nothing")))
    return record[column]


def _value(record: Mapping[str, Any], column: str, key: str = "") -> Any:
    """A cell, or what is under a key of its table; raises ValueError where it cannot be read."""
    cell = cell_of(record, column)
    if isinstance(cell, ValueError):  # A reader has found this wrong with it.
        raise ValueError(say("{name} {error}", name=column, error=cell))
    return _table(column, cell).get(key) if key else cell


def _as_text(value: object, column: str, key: str, may_count: bool) -> str:
    if isinstance(value, str):
        return value
    if may_count and (isinstance(value, int) or (isinstance(value, (float, Decimal)) and isfinite(value))):
        return str(value).lower() if isinstance(value, bool) else format(Decimal(str(value)), "f")
    if key:
        raise ValueError(say("{name} has no text under {key}", name=column, key=key))
    kind = "null" if value is None else type(value).__name__
    raise ValueError(say("{name} is {kind}, not a text", name=column, kind=kind))


def _table(name: str, cell: object) -> Mapping[str, Any]:
    if isinstance(cell, str):
        try:
            cell = parsed(cell)
        except ValueError as error:
            raise ValueError(say("{name} holds no table ({error})", name=name, error=error)) from None
    if isinstance(cell, list) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in cell):
        cell = dict(cell)  # a map of Arrow
    if not isinstance(cell, dict):
        held = "null" if cell is None else type(cell).__name__
        raise ValueError(say('{name} holds {held}, not a table such as {{"en": ...}}', name=name, held=held))
    return cell
