"""The columns of files that say which documents answer a query.

Either a row is one document with its label (`query, document, label`), or a query with documents that answer it and
others that do not (`query, pos, neg`, each a text or a list of texts).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from data.sources.columns import Columns, Record, RowOf, numbered_columns
from data.sources.expressions import ANSWERS, NUMBER, TEXT, Cell, Shapes
from data.sources.label_columns import LabelColumns
from data.sources.reader import Head
from data.text.cells import kind_of, list_in, spelled
from data.text.conversations import Examples, TextRow
from data.text.labels import label_of, numbered
from data.text.relevance import NOT_RELEVANT, RELEVANT, JudgedPairs, JudgedTexts, asked_text, scored_text
from data.text.templates import USER, Turn
from settings.declared import DataConfig
from settings.fields import listed
from support.language import say

QUERY = "query"
DOCUMENT = "document"
LABEL = "label"
POSITIVES = ("pos", "positive", "positives", DOCUMENT)  # Names of the column with documents that answer the query.
NEGATIVES = ("neg", "negative", "negatives")
BESIDE_QUERY = f"{QUERY}, "  # What the encoder reads is named so: the query and what stands beside it.
WORDS = {RELEVANT: 1.0, NOT_RELEVANT: 0.0}
TEXT_OR_OBJECT: Shapes = TEXT | {dict}
Judged = list[tuple[str, Any]]  # Documents, each with its label as the file has it.


@dataclass(frozen=True)
class JudgedColumns:
    """Columns of a query and of its judged documents.

    Args:
        first, second: document and label; or of lists, those that answer the query and the others.
        are_lists: whether a row has several documents.
        further: more columns of documents that do not answer the query, such as `negative_2`.
    """

    first: str
    second: str
    are_lists: bool
    further: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Sequence[str]) -> JudgedColumns | None:
        """The columns of a file that has these; None: it judges no documents."""
        positive = next((name for name in POSITIVES if name in names), None)
        negatives = numbered_columns(names, NEGATIVES)
        if QUERY not in names or positive is None:
            return None
        if negatives:
            return cls(positive, negatives[0], are_lists=True, further=tuple(negatives[1:]))
        return cls(DOCUMENT, LABEL, are_lists=False) if {DOCUMENT, LABEL} <= {*names} else None

    @property
    def lists(self) -> list[str]:
        """The columns of documents, where a row has several: those that answer the query first."""
        return [self.first, self.second, *self.further]

    def kinds(self) -> dict[str, Shapes]:
        """The types of cells that each column may have."""
        if self.are_lists:
            return {QUERY: TEXT, **dict.fromkeys(self.lists, TEXT_OR_OBJECT | ANSWERS)}
        return {QUERY: TEXT, self.first: TEXT_OR_OBJECT, self.second: TEXT | NUMBER}

    def sides(self) -> list[str]:
        """The columns of the query and its documents, and those of the labels, for people."""
        if self.are_lists:
            return [BESIDE_QUERY + ", ".join(self.lists), ", ".join(self.lists)]
        return [BESIDE_QUERY + self.first, self.second]

    def read(self, record: Record) -> tuple[str, Judged]:
        """The query of a record and its documents, at least one.

        Raises:
            ValueError: with what is wrong.
        """
        (query,) = Cell(QUERY).texts(record)
        if not query.strip():
            raise ValueError(say("{column} is empty", column=QUERY))
        if self.are_lists:
            cells = [(name, Cell(name).value(record)) for name in self.lists if name in record]
            judged = [
                (document_text(entry, name), int(name == self.first)) for name, cell in cells for entry in entries(cell)
            ]
        else:
            document = document_text(Cell(self.first).value(record), self.first)
            judged = [(document, Cell(self.second).value(record))]
        if not judged:
            raise ValueError(say("{column} is empty", column=self.sides()[1]))
        if not all(text.strip() for text, _ in judged):
            raise ValueError(say("{column} holds an empty document", column=self.first))
        return query, judged


@dataclass(frozen=True)
class JudgedLayout:
    """A line of `data.sources.layouts.PAIR_LAYOUTS`: documents that answer a query are pairs with "true", the others
    with "false".
    """

    teaches: str

    def columns(self, data: DataConfig, head: Head, count: int | None) -> Columns | None:
        """As of `data.sources.layouts.Layout`."""
        judged = JudgedColumns.of(head.all_names)
        return None if judged is None else JudgedPairColumns((QUERY, DOCUMENT), is_known=True, judged=judged)


@dataclass(frozen=True)
class JudgedPairColumns(Columns):
    """Queries with judged documents, as pairs."""

    judged: JudgedColumns = JudgedColumns(DOCUMENT, LABEL, are_lists=False)
    examples_class: ClassVar[type[Examples] | None] = JudgedPairs

    @property
    def form(self) -> str:
        return "judged"

    def sides(self) -> list[str]:
        return self.judged.sides()

    def cells(self) -> list[str]:
        return self.sides()

    def kinds(self, names: Sequence[str]) -> dict[str, Shapes]:
        return self.judged.kinds()

    def row_of(self, names: Sequence[str]) -> RowOf:
        return self._row

    def _row(self, record: Record) -> TextRow:
        """The query of a record, and JSON of its documents with what is answered of each."""
        query, judged = self.judged.read(record)
        documents = [(text, RELEVANT if self._is_relevant(cell) else NOT_RELEVANT) for text, cell in judged]
        return query, json.dumps(documents, ensure_ascii=False)

    def _is_relevant(self, cell: object) -> bool:
        relevance = relevance_of(cell, self.judged.second)
        if relevance not in (0.0, 1.0):
            raise ValueError(
                say(
                    "{column} is {value}; allowed: 0 and 1, or false and true; for degrees of relevance use "
                    "--head=sequence --labels=regression",
                    column=self.judged.second,
                    value=listed([cell]),
                )
            )
        return relevance == 1.0

    def question_of(self, names: Sequence[str]) -> Callable[[Record], list[Turn]]:
        return self._asked

    def _asked(self, record: Record) -> list[Turn]:
        query, judged = self.judged.read(record)
        if len(judged) > 1:
            raise ValueError(say("{columns} are several documents; rank them with rerank", columns=self.sides()[1]))
        return [(USER, asked_text(query, judged[0][0]))]


@dataclass(frozen=True)
class JudgedTextColumns(LabelColumns):
    """Queries with judged documents, as texts with labels: of lists 1 and 0."""

    judged: JudgedColumns = JudgedColumns(DOCUMENT, LABEL, are_lists=False)
    examples_class: ClassVar[type[Examples] | None] = JudgedTexts

    def sides(self) -> list[str]:
        return self.judged.sides()

    def cells(self) -> list[str]:
        return self.sides()

    def kinds(self, names: Sequence[str]) -> dict[str, Shapes]:
        return self.judged.kinds()

    def labels(self, text: str, cell: object, mask: object) -> list[str | None]:
        return label_of(cell, mask)

    def row_of(self, names: Sequence[str]) -> RowOf:
        return self._documents

    def _documents(self, record: Record) -> TextRow:
        """JSON of the texts of a record, and of their labels: names where these are not known yet, else what is
        trained.
        """
        query, judged = self.judged.read(record)
        texts = [scored_text(query, text) for text, _ in judged]
        try:
            labels = [label for text, cell in judged for label in self.labels(text, cell, None)]
            values = labels if self.names is None else numbered(labels, self.names)
        except ValueError as error:
            raise ValueError(say("{name} {error}", name=self.judged.second, error=error)) from None
        return json.dumps(texts, ensure_ascii=False), json.dumps(values, ensure_ascii=False)


def judged_text_columns(data: DataConfig, head: Head) -> JudgedTextColumns | None:
    """The columns of a file for a head over labels; None: it has others, or the text that the settings name."""
    judged = JudgedColumns.of(head.all_names)
    if judged is None or {data.text_column, data.label_column} <= {*head.names}:
        return None
    return JudgedTextColumns((QUERY,), label=judged.second, judged=judged)


def entries(cell: object) -> list[Any]:
    """The documents of a cell: one, or a list of them, which CSV has as JSON; null is none."""
    if cell is None:
        return []
    if isinstance(cell, str):
        spelled_out = list_in(cell)
        return [cell] if spelled_out is None else [*spelled_out]
    return [*cell] if isinstance(cell, list) else [cell]


def document_text(document: object, name: str) -> str:
    """The text of a document: itself, or what an object has under `text`.

    Args:
        name: of its column, for messages.
    Raises:
        ValueError: it has none.
    """
    text = document.get("text") if isinstance(document, dict) else document
    if isinstance(text, str):
        return text
    if isinstance(document, dict):
        raise ValueError(say("{name} has no text under {key}", name=name, key="text"))
    raise ValueError(say("{name} is {kind}, not a text", name=name, kind=kind_of(document)))


def relevance_of(cell: object, name: str) -> float:
    """How relevant a document is: a number of 0 or more, or true or false.

    Args:
        name: of its column, for messages.
    Raises:
        ValueError: it is none of them.
    """
    word = str(spelled(cell)).strip().lower()
    try:
        relevance = WORDS[word] if word in WORDS else float(word)
    except ValueError:
        relevance = math.nan
    if not 0.0 <= relevance < math.inf:
        raise ValueError(
            say("{name} is {value}; allowed: a number of 0 or more, true, false", name=name, value=listed([cell]))
        )
    return relevance
