"""The columns of a text and its labels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from data.sources.columns import Columns, Record, RowOf
from data.sources.expressions import NUMBER, TEXT, TURNS, Cell, Shapes
from data.text.conversations import TextRow
from data.text.labels import joined_words, numbered
from settings.fields import listed
from support.language import say

MASK = "mask"  # the column that says which labels count
LABELS: Shapes = TEXT | NUMBER | TURNS


@dataclass(frozen=True)
class LabelColumns(Columns):
    """A column of texts and one of labels, with a third one named `mask` where a file has it.

    Args:
        names: of the labels; (): they are numbers to be predicted; None: not known yet.
        label: column of the labels.
    """

    label: str = ""

    @property
    def form(self) -> str:
        return "labels"

    def labels(self, text: str, cell: object, mask: object) -> list[str | None]:
        """The labels of a text, None where they are masked.

        Raises:
            ValueError: with what is wrong.
        """
        raise NotImplementedError

    def missing(self, file: object, problems: str, names: Sequence[str]) -> str:
        return say(
            "{file}: {problems}; columns: {columns}; give yours with --text_column and --label_column",
            file=file,
            problems=problems,
            columns=listed(names),
        )

    def sides(self) -> list[str]:
        return self.cells()

    def cells(self) -> list[str]:
        return [*self.texts, self.label]

    def kinds(self, names: Sequence[str]) -> dict[str, Shapes]:
        masks = {MASK} & {*names}
        return {self.texts[0]: TEXT | TURNS, **dict.fromkeys([self.label, *masks], LABELS)}

    def row_of(self, names: Sequence[str]) -> RowOf:
        return self._row

    def _row(self, record: Record) -> TextRow:
        """The text of a record, and JSON of its labels: names where these are not known yet, else what is trained."""
        cell = Cell(self.texts[0])
        (text,) = cell.texts({cell.column: joined_words(cell.value(record))})
        label = Cell(self.label).value(record)
        mask = Cell(MASK).value(record) if MASK in record else None
        if not text.strip():
            raise ValueError(say("{column} is empty", column=cell))
        try:
            labels = self.labels(text, label, mask)
            values = labels if self.names is None else numbered(labels, self.names)
        except ValueError as error:
            raise ValueError(say("{name} {error}", name=self.label, error=error)) from None
        return text, json.dumps(values, ensure_ascii=False)
