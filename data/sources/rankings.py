"""Queries with the documents that are to be ranked for them, from the rows of files.

A row has a query and all its documents (`query, documents`, and where known `relevant`, the indices of those that
answer it; or as in training `query, pos, neg`), or one document (`query, document`, and where known `label`): then the
rows of a query stand together. A row keeps its other columns, as those of `data.sources.prompts` do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from data.sources.columns import Columns
from data.sources.expressions import TEXT, Cell, Shapes
from data.sources.lines import LONGEST_LINE_BYTES, BadRows, Record, place_of
from data.sources.prompts import fits_json, read_in_child
from data.sources.reader import Head
from data.sources.reading import check_types, head_of, reading, records
from data.sources.relevance import DOCUMENT, LABEL, QUERY, JudgedColumns, document_text, entries, relevance_of
from data.sources.source import Source
from data.text.cells import kind_of, parsed
from settings.errors import UserError, reason_of
from settings.fields import is_encodable, listed
from support.language import say

DOCUMENTS = "documents"
RELEVANT = "relevant"
LIST: Shapes = TEXT | {list}
GRADE: Shapes = TEXT | {int, bool}  # Decimals could not be written again.
EMPTY = (None, "")  # Cells that say nothing.


@dataclass
class Ranking:
    """A query and its documents.

    Args:
        origin: file and row, for messages.
        documents: as the file has them, texts or objects with a text.
        records: the other columns, of the row; or where each document is a row, all columns of each.
        is_flat: whether each document is a row.
        relevance: of each document; None: it is not known.
    """

    origin: str
    query: str
    documents: list[Any]
    records: list[Record]
    is_flat: bool
    relevance: list[float] | None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [document_text(document, DOCUMENT) for document in self.documents]

    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        return sys.getsizeof(self.records) + len(repr((self.query, self.documents, self.records)))


@dataclass(frozen=True)
class RankedColumns(Columns):
    """The columns of a file that make rankings.

    Args:
        judged: columns as in training, where the file has those; else it has a list, or a document a row.
    """

    judged: JudgedColumns | None = None

    @property
    def is_flat(self) -> bool:
        """Whether each document is a row."""
        return self.judged is None and DOCUMENT in self.texts

    def kinds(self, names: Sequence[str]) -> dict[str, Shapes]:
        if self.judged is not None:
            return self.judged.kinds()
        if self.is_flat:
            label = {LABEL: GRADE} if LABEL in names else {}
            return {QUERY: TEXT, DOCUMENT: TEXT | {dict}, **label}
        return {QUERY: TEXT, DOCUMENTS: LIST, **({RELEVANT: LIST} if RELEVANT in names else {})}

    def ranking(self, origin: str, record: Record) -> Ranking:
        """The ranking of one row, of flat rows with one document.

        Raises:
            ValueError: with what is wrong.
        """
        for name, cell in record.items():
            if isinstance(cell, ValueError):
                raise ValueError(say("{name} {error}", name=name, error=cell))
        (query,) = Cell(QUERY).texts(record)
        if not query.strip():
            raise ValueError(say("{column} is empty", column=QUERY))
        if self.is_flat:
            document = Cell(DOCUMENT).value(record)
            relevance = None if record.get(LABEL) in EMPTY else [relevance_of(record[LABEL], LABEL)]
            ranking = Ranking(origin, query, [document], [record], True, relevance)
        elif self.judged is not None:
            ranking = self._of_judged(origin, query, record, self.judged)
        else:
            ranking = self._of_list(origin, query, record)
        if not all(map(is_encodable, (query, *ranking.texts))):
            raise ValueError(say("{sides} holds half of a surrogate pair", sides=self.texts[1]))
        return ranking

    def _of_judged(self, origin: str, query: str, record: Record, judged: JudgedColumns) -> Ranking:
        positives, *others = (entries(record.get(name)) for name in judged.lists)
        negatives = [document for documents in others for document in documents]
        rest = _without(record, QUERY, *judged.lists)
        relevance = [1.0] * len(positives) + [0.0] * len(negatives)
        rest[RELEVANT] = list(range(len(positives)))
        return Ranking(origin, query, positives + negatives, [rest], False, relevance)

    def _of_list(self, origin: str, query: str, record: Record) -> Ranking:
        documents = _list(Cell(DOCUMENTS).value(record), DOCUMENTS)
        relevance = None
        if record.get(RELEVANT) not in EMPTY:
            relevance = [0.0] * len(documents)
            for index in _list(record[RELEVANT], RELEVANT):
                if type(index) is not int or not 0 <= index < len(documents):
                    message = "{name} has {value}; allowed: indices of documents, 0 to {last}"
                    raise ValueError(say(message, name=RELEVANT, value=listed([index]), last=len(documents) - 1))
                relevance[index] = 1.0
        return Ranking(origin, query, documents, [_without(record, QUERY, DOCUMENTS)], False, relevance)


def ranked_columns(head: Head) -> RankedColumns | None:
    """The columns of a file; None: it ranks nothing."""
    if {QUERY, DOCUMENTS} <= {*head.names}:
        return RankedColumns((QUERY, DOCUMENTS))
    judged = JudgedColumns.of(head.all_names)
    if judged is not None and judged.are_lists:
        return RankedColumns((QUERY, *judged.lists), judged=judged)
    return RankedColumns((QUERY, DOCUMENT)) if {QUERY, DOCUMENT} <= {*head.names} else None


def _list(cell: object, name: str) -> list[Any]:
    """The list that a cell holds, in CSV files as JSON."""
    try:
        entries = parsed(cell) if isinstance(cell, str) else cell
    except ValueError as error:
        raise ValueError(say("{name} holds no list ({error})", name=name, error=error)) from None
    if not isinstance(entries, list):
        raise ValueError(say("{name} holds {kind}, not a list", name=name, kind=kind_of(cell)))
    return entries


def _without(record: Record, *names: str) -> Record:
    return {name: cell for name, cell in record.items() if name not in names}


def rankings_in_child(sources: Sequence[Source], bad_rows: BadRows, max_bytes: int) -> Iterator[Ranking]:
    """The same as `read_rankings`, read in a child process; raises as `data.sources.prompts.read_in_child`.

    Args:
        max_bytes: of memory that the child may hold.
    """
    return read_in_child(sources, partial(_read, sources=sources), Ranking.num_bytes, bad_rows, max_bytes)


def _read(bad_rows: BadRows, sources: Sequence[Source]) -> Iterator[Ranking]:
    return read_rankings(sources, bad_rows)


def read_rankings(sources: Sequence[Source], bad_rows: BadRows) -> Iterator[Ranking]:
    """Read the rankings of files, in order; bad rows are left out.

    Raises:
        UserError: a file is broken, has no such columns, or more than 16 MiB of documents for one query.
    Memory: the documents of one query.
    """
    for source in sources:
        with reading(source):
            rankings = _rankings(source, bad_rows)
            yield from _joined(rankings) if _columns(source).is_flat else rankings


def _columns(source: Source) -> RankedColumns:
    head = head_of(source)
    columns = ranked_columns(head)
    if columns is None:
        raise UserError(
            "{file}: has no query and documents to rank; its columns: {columns}; needed: query and documents, or query "
            "and document",
            file=source.path,
            columns=listed(head.names),
        )
    return columns


def _rankings(source: Source, bad_rows: BadRows) -> Iterator[Ranking]:
    columns = _columns(source)
    check_types(source, columns)
    head = head_of(source)
    no_json = {name for name in head.types if not fits_json(head.sample[name])}
    read = {*head.all_names} - no_json | columns.kinds(head.all_names).keys()
    for number, record in records(source, [name for name in head.all_names if name in read], bad_rows):
        origin = say("{path}, {place}", path=source.path, place=place_of(source, number))
        try:
            ranking = columns.ranking(origin, record)
        except ValueError as error:
            bad_rows.add(source, number, reason_of(error))
        else:
            yield ranking


def _joined(rankings: Iterator[Ranking]) -> Iterator[Ranking]:
    """Rankings of one document each, those of the same query as one where they stand together."""
    whole: Ranking | None = None
    size = 0
    for ranking in rankings:
        if whole is None or ranking.query != whole.query:
            if whole is not None:
                yield whole
            whole = ranking
            size = len(repr(ranking.records))
            continue
        size += len(repr(ranking.records))
        if size > LONGEST_LINE_BYTES:
            raise UserError(
                "{place}: the documents of one query are larger than {size} MiB together; rank fewer at a time",
                place=ranking.origin,
                size=LONGEST_LINE_BYTES // 1024**2,
            )
        whole.documents += ranking.documents
        whole.records += ranking.records
        if whole.relevance is not None and ranking.relevance is not None:
            whole.relevance += ranking.relevance
        else:
            whole.relevance = None
    if whole is not None:
        yield whole
