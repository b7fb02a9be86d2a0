"""What of a record makes a text: a column, `column.key` of its tables, or several joined.

`instruction+input` is both texts, one below the other (the second may be missing in a row), `prefix: input_text` both
in one line, `translation.en` the text under a key of a cell that holds a table. A list under a key holds several right
answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

from data.text.cells import kind_of, parsed, spelled
from data.text.conversations import turns_of
from data.text.templates import Turn
from settings.fields import listed
from support.language import say

# sign -> what stands between the texts, and the place of the one that a row must have
JOINTS = {"+": ("\n", 0), ": ": (": ", -1), "": ("", 0)}
# The types of the cells that a text may be made of. Where cells may be turns, a list holds these, and else right
# answers.
Shapes = frozenset[type]
TEXT: Shapes = frozenset({str})
NUMBER: Shapes = frozenset({int, bool, Decimal})
ANSWERS: Shapes = frozenset({list})
TABLE: Shapes = frozenset({list, dict})
TURNS: Shapes = TABLE


@dataclass(frozen=True)
class Cell:
    """A column, or what its tables hold under a key.

    Args:
        shapes: what cells of the column may be. A list, where there may be one, holds texts of which one is enough.
    """

    column: str
    key: str = ""
    shapes: Shapes = TEXT

    @classmethod
    def parse(cls, text: str, names: Sequence[str], shapes: Shapes = TEXT) -> Cell:
        """The cell that a text names in a file with these columns."""
        column, _, key = text.partition(".")
        if key and text not in names and column in names:
            return cls(column, key, shapes | TABLE)
        return cls(text, "", shapes)

    def __str__(self) -> str:
        return ".".join(filter(None, [self.column, self.key]))

    def value(self, record: Mapping[str, Any]) -> Any:
        """What a record holds there; ValueError where the column is missing, could not be read, or holds no table for a
        key.
        """
        if self.column not in record:
            has = listed(record) or say("nothing")
            raise ValueError(say("has no {name}; it has {value}", name=self.column, value=has))
        value = record[self.column]
        if isinstance(value, ValueError):
            raise ValueError(say("{name} {error}", name=self.column, error=value))
        if not self.key:
            return value
        if isinstance(value, list):
            return [self._table(entry).get(self.key) for entry in value]
        return self._table(value).get(self.key)

    def texts(self, record: Mapping[str, Any]) -> list[str]:
        """The texts of a record, each once: one, or the right answers of a list; ValueError where there is none."""
        value = self.value(record)
        entries = value if isinstance(value, list) and list in self.shapes else [value]
        texts = [self._text(entry) for entry in entries]
        if not texts:
            raise ValueError(self._no_text(say("{column} is empty", column=self.column)))
        return list(dict.fromkeys(filter(str.strip, texts))) or texts[:1]

    def turns(self, record: Mapping[str, Any]) -> list[Turn]:
        """The turns of a conversation; ValueError where there are none."""
        value = self.value(record)
        try:
            return turns_of(value)
        except ValueError as error:
            raise ValueError(say("{name} {error}", name=self.column, error=error)) from None

    def _text(self, value: object) -> str:
        text = spelled(value) if int in self.shapes else value
        if isinstance(text, str):
            return text
        raise ValueError(self._no_text(say("{name} is {kind}, not a text", name=self.column, kind=kind_of(value))))

    def _no_text(self, problem: str) -> str:
        return say("{name} has no text under {key}", name=self.column, key=self.key) if self.key else problem

    def _table(self, value: object) -> Mapping[str, Any]:
        if isinstance(value, str):
            try:
                value = parsed(value)
            except ValueError as error:
                raise ValueError(say("{name} holds no table ({error})", name=self.column, error=error)) from None
        if isinstance(value, dict):
            return value
        no_table = '{name} holds {held}, not a table such as {{"en": ...}}'
        raise ValueError(say(no_table, name=self.column, held=kind_of(value)))


@dataclass(frozen=True)
class Expression:
    """One text of a row as one file has it.

    Args:
        cells: what is joined, one or more. needed: that which a row must have. sign: joins them, a key of `JOINTS`.
    """

    cells: Sequence[Cell]
    needed: Cell
    sign: str = ""

    @classmethod
    def parse(cls, text: str, names: Sequence[str], may_lack: bool = False, shapes: Shapes = TEXT) -> Expression:
        """The expression that a text means in a file with these columns.

        Args:
            may_lack: whether cells that the file has not are left out, but for the one that is needed.
        """
        sign = next(sign for sign in JOINTS if sign in text)
        if sign == "" or text in names:
            cell = Cell.parse(text, names, shapes)
            return cls([cell], cell)
        cells = [Cell.parse(piece, names, shapes) for piece in text.split(sign)]
        needed = cells[JOINTS[sign][1]]
        if may_lack:
            cells = [cell for cell in cells if cell.column in (needed.column, *names)]
        return cls(cells, needed, sign)

    def __str__(self) -> str:
        return self.sign.join(map(str, self.cells))

    @cached_property
    def name(self) -> str:
        """The column that is the text; no column has the name of a text that a key or several cells make."""
        return str(self)

    def text(self, record: Mapping[str, Any]) -> str:
        """The text of a record, of several right answers the first; ValueError where it has none."""
        text = record.get(self.name)
        return text if isinstance(text, str) else self.texts(record)[0]

    def texts(self, record: Mapping[str, Any]) -> list[str]:
        """The right answers of a record, each once, or its one text; ValueError where it has none."""
        if not self.sign:
            return self.needed.texts(record)
        present = (cell for cell in self.cells if cell == self.needed or record.get(cell.column) is not None)
        texts = [cell.texts(record)[0] for cell in present]
        return [JOINTS[self.sign][0].join(filter(str.strip, texts))]

    def text_or_turns(self, record: Mapping[str, Any]) -> str | list[Turn]:
        """The text of a record, or turns where its cell holds messages; ValueError where it has neither."""
        if dict in self.needed.shapes and isinstance(record.get(self.name), (list, dict)):
            return self.needed.turns(record)
        return self.text(record)
