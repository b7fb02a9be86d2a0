"""The columns of texts that belong together or are more or less alike, and of texts with the vectors to become.

A file says by the names of its columns what its rows are, as the data sets of sentence-transformers name them:

    texts that belong together:   anchor, positive, and negative, negative_1 ... where there are some
    alike by a number:            sentence1, sentence2, score
    with a vector to become:      text, beside a file of vectors

Cells of positives and negatives may be lists of texts (`query, pos, neg`); each positive then makes an example with all
negatives. Each file has columns of its own.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.sources.columns import PLAIN, Columns, Record, RowOf, numbered_columns
from data.sources.expressions import ANSWERS, NUMBER, TEXT, Cell, Shapes
from data.text.cells import list_in, spelled
from data.text.conversations import TextRow
from settings.declared import DataConfig
from settings.errors import UserError
from settings.fields import is_encodable, listed
from support.language import say

FIRST_TEXTS = ("anchor", "query", "question", "sentence1", "sentence_A", "text1")
SECOND_TEXTS = ("positive", "pos", "positives", "document", "passage", "answer", "sentence2", "sentence_B", "text2")
NEGATIVES = ("negative", "neg", "negatives")  # Numbers may follow: negative_1.
SCORES = ("score", "similarity_score", "similarity", "label")
VECTOR = "vector"  # The column of a Parquet file of vectors, as `commands.embed` writes it.
VECTORS_AT_ONCE = 256  # Are read of a Parquet file.
MOST_TEXTS = 64  # A row has no more texts,
USUAL_TEXTS = 3  # and usually these: what is looked for, what is found, and what is not to be found.
DEFAULTS = DataConfig()
NOTHING: tuple[object, ...] = (None, "", "[]", [])  # Cells of a row without negatives.
NO_NUMBER = np.full(1, np.nan, np.float32)


class FileColumns(NamedTuple):
    """The columns of one file: those of the texts, the most important first, and that of the number; empty: none."""

    texts: tuple[str, ...]
    score: str = ""


@dataclass(frozen=True)
class EmbeddingColumns(Columns):
    """Columns of texts, and of a number that says how alike they are.

    Args:
        text_columns: those of the texts where a setting names them; none: by the names that a file has.
        score: the column of the number where a setting names it.
        vectors: the file with a vector for each row; empty: there is none.
    """

    text_columns: tuple[str, ...] = ()
    score: str = ""
    vectors: str = ""

    @classmethod
    def of_settings(cls, data: DataConfig, names: Sequence[str]) -> EmbeddingColumns:
        """The columns that the settings name, of files of which the first has these columns."""
        text_columns: tuple[str, ...] = ()
        if data.text_column != DEFAULTS.text_column:
            text_columns = tuple(word.strip() for word in data.text_column.split(","))
        score = data.label_column if data.label_column != DEFAULTS.label_column else ""
        columns = cls((), text_columns=text_columns, score=score, vectors=data.teacher_vectors or "")
        return cls(columns.of_file(names).texts, text_columns=text_columns, score=score, vectors=columns.vectors)

    def of_file(self, names: Sequence[str]) -> FileColumns:
        """The columns of a file.

        Args:
            names: of all its columns.
        """
        if self.text_columns:
            texts = self.text_columns
        elif self.vectors and DEFAULTS.text_column in names:
            texts = (DEFAULTS.text_column,)
        else:
            first = [name for name in FIRST_TEXTS if name in names][:1]
            second = [name for name in SECOND_TEXTS if name in names][:1]
            negatives = numbered_columns(names, NEGATIVES)
            texts = (*first, *second, *negatives) if first and second else (DEFAULTS.text_column,)
        if self.score:
            return FileColumns(texts, self.score)
        has_score = len(texts) == 2
        return FileColumns(texts, next((name for name in SCORES if has_score and name in names), ""))

    @property
    def form(self) -> str:
        return PLAIN if len(self.texts) == 1 else "texts"

    def missing(self, file: object, problems: str, names: Sequence[str]) -> str:
        return say(
            "{file}: {problems}; columns: {columns}; name the columns of the texts with "
            "--text_column=anchor,positive, and that of their similarity with --label_column",
            file=file,
            problems=problems,
            columns=listed(names),
        )

    def sides(self) -> list[str]:
        return [*self.texts, *filter(None, [self.score, self.vectors])]

    def cells(self) -> list[str]:
        return list(self.texts)

    def kinds(self, names: Sequence[str]) -> dict[str, Shapes]:
        columns = self.of_file(names)
        kinds = dict.fromkeys(columns.texts, TEXT | ANSWERS)
        return {**kinds, columns.texts[0]: TEXT, **({columns.score: TEXT | NUMBER} if columns.score else {})}

    def row_of(self, names: Sequence[str]) -> RowOf:
        columns = self.of_file(names)
        if len(columns.texts) > 1 or not self.vectors:
            # Objects of JSON may have columns that the first ones of their file do not have.
            with_further = lru_cache(lambda further: self.of_file([*names, *further]))
            known = frozenset(names)
            return lambda record: self._row(with_further(tuple(sorted(record.keys() - known))), record)
        return RowWithVector(columns.texts[0], self.vectors, vectors_in(self.vectors))

    def check_end(self, row_of: RowOf) -> None:
        if isinstance(row_of, RowWithVector):
            row_of.check_end()

    def _row(self, columns: FileColumns, record: Record) -> TextRow:
        """The first text of a record, those that belong to it as JSON, its negatives, if any, and its number."""
        first, *others = columns.texts
        query = _text(first, record)
        there = [name for name in others if name in others[:1] or record.get(name) not in NOTHING]
        lists = [texts_of_list(Cell(name), record) for name in there]
        texts = [query, *(text for each in lists for text in each)]
        if not all(map(str.strip, texts)):
            raise ValueError(say("{names} has an empty text", names=listed(columns.texts)))
        if not all(map(is_encodable, texts)):
            raise ValueError(say("{name} holds half of a surrogate pair", name=listed(columns.texts)))
        if len(texts) > MOST_TEXTS:
            raise ValueError(say("has {count} texts, and at most {most} are read", count=len(texts), most=MOST_TEXTS))
        if len(texts) == 1:
            raise ValueError(say("has only one text; a pair needs two"))
        positives = json.dumps(lists[0])
        negatives = texts[1 + len(lists[0]) :]
        return (query, positives, *negatives, packed(_number(columns.score, record) if columns.score else NO_NUMBER))


@dataclass(frozen=True)
class RowWithVector:
    """Makes rows of a text and its vector.

    Args:
        column: of the text. file: of the vectors, for messages. vectors: one for each record, in their order.
    """

    column: str
    file: str
    vectors: Iterator[NDArray[np.float32]]

    def __call__(self, record: Record) -> TextRow:
        vector = next(self.vectors, None)
        if vector is None:
            raise ValueError(say("has no embedding in {file}, which has fewer than there are rows", file=self.file))
        return (_text(self.column, record), packed(vector))

    def check_end(self) -> None:
        """Raises UserError if there are more vectors than records."""
        if next(self.vectors, None) is not None:
            raise UserError(
                "--teacher_vectors = {file}, has more embeddings than there are rows in a file; the embeddings of one "
                "training file belong to its rows in order, and validation_file may hold graded pairs",
                file=self.file,
            )


def _text(column: str, record: Record) -> str:
    (text,) = Cell(column).texts(record)
    if not text.strip():
        raise ValueError(say("{column} is empty", column=column))
    return text


def texts_of_list(cell: Cell, record: Record) -> list[str]:
    """The texts of a cell, each once: one, or a list of them, which CSV has as JSON.

    Raises:
        ValueError: there is none.
    """
    value = cell.value(record)
    entries = list_in(value) if isinstance(value, str) else None
    if entries is not None:
        record = {cell.column: entries}
    return replace(cell, shapes=TEXT | ANSWERS).texts(record)


def _number(column: str, record: Record) -> NDArray[np.float32]:
    cell = Cell(column).value(record)
    try:
        number = float(str(spelled(cell)))
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise ValueError(say("{column} holds {value}, not a number", column=column, value=listed([cell])))
    return np.array([number], np.float32)


def packed(targets: NDArray[np.float32]) -> str:
    """Numbers as text, exactly: rows are texts on their way to the processes that encode."""
    return base64.b64encode(targets.astype("<f4").tobytes()).decode()


def unpacked(text: str) -> NDArray[np.float32]:
    """The numbers that `packed` has written."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def vectors_in(file: str) -> Iterator[NDArray[np.float32]]:
    """The vectors of a file, (W,) each: of `.npy` (rows, W), or of the column `vector` of `.parquet`.

    Raises:
        UserError: the file is missing, or holds no vectors.
    Memory: one Parquet batch; of `.npy` the pages that are read.
    """
    path = Path(file)
    try:
        for vectors in _array_vectors(path) if path.suffix == ".npy" else _parquet_vectors(path):
            if not np.isfinite(vectors).all():
                raise ValueError(say("holds an embedding with numbers that are not finite"))
            yield from vectors
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(
            "--teacher_vectors = {file}, cannot be read ({error}); allowed: .npy with one row per text, or .parquet "
            "with a column vector",
            file=file,
            error=error,
        ) from None


def _array_vectors(path: Path) -> Iterator[NDArray[np.float32]]:
    """The vectors of a `.npy` file, (n, W) at a time."""
    matrix = np.load(path, mmap_mode="r")
    if matrix.ndim != 2 or matrix.shape[1] < 2 or matrix.dtype.kind != "f":
        raise ValueError(say("holds {kind}, not one embedding per row", kind=f"{matrix.dtype} {matrix.shape}"))
    for first in range(0, len(matrix), VECTORS_AT_ONCE):
        yield np.array(matrix[first : first + VECTORS_AT_ONCE], np.float32)


def _parquet_vectors(path: Path) -> Iterator[NDArray[np.float32]]:
    """The vectors of a `.parquet` file, (n, W) at a time."""
    with pq.ParquetFile(path) as parquet:
        width = 0
        for batch in parquet.iter_batches(VECTORS_AT_ONCE, columns=[VECTOR]):
            cells = batch.column(VECTOR)
            kind = cells.type
            is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
            if not is_list or not pa.types.is_floating(kind.value_type):
                raise ValueError(say("holds {kind}, not one embedding per row", kind=kind))
            lengths = {len(cell) if cell.is_valid else 0 for cell in cells}
            values = cells.flatten()
            width = width or max(lengths)
            if lengths != {width} or values.null_count:
                raise ValueError(say("holds embeddings of several dimensions"))
            yield np.asarray(values, np.float32).reshape(-1, width)
