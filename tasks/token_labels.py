"""A text with a label for each of its words or letters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import IGNORED_LABEL, Batch, LabelledRow
from data.batches.rows import RowSettings
from data.prepare.encode import Encoder, TextEncoder
from data.sources.columns import Columns
from data.sources.label_columns import LabelColumns
from data.sources.source import Source
from data.task import RowLimits, ShardFormat, Table
from data.text.conversations import Examples
from data.text.labels import labels_of, spans_of
from data.text.proteins import PREPARATIONS
from data.tokenizers.backends import Ids
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import DataConfig
from settings.errors import UserError
from tasks.base import Outputs
from tasks.label_outputs import (
    EncodedText,
    LabelAnswer,
    LabelEncoder,
    LabelOutputs,
    Labels,
    aligned,
    cells,
    in_line,
    predictions,
    probabilities,
)


@dataclass(frozen=True)
class WordLabels(LabelColumns):
    """A column of texts and one with a label for each of their words or letters.

    Args:
        is_protein: whether a text is letters, whatever blanks it has.
    """

    is_protein: bool = False

    def labels(self, text: str, cell: object, mask: object) -> list[str | None]:
        labels = labels_of(cell, mask)
        spans_of("".join(text.split()) if self.is_protein else text, len(labels), self.is_protein)
        return labels


class WordLabelEncoder(LabelEncoder):
    """The first token of each word or letter gets its label."""

    def label(self, texts: Sequence[str], labels: Sequence[list[float | None]]) -> tuple[list[Ids], list[Labels]]:
        encoder = TextEncoder(self.tokenizer, self.examples.prepare)
        rows = list[Ids]()
        placed = list[Labels]()
        for text, values in zip(texts, labels, strict=True):
            ids, firsts = encoder.with_places(text, len(values))
            has_token = firsts >= 0
            row = np.full(len(ids) + 1, np.nan)
            row[firsts[has_token]] = np.array(values, float)[has_token]
            limit = self.limits[0]
            if limit is not None:  # End of text takes the place of the last token that is left.
                row[limit - 1 :] = np.nan
                row = row[:limit]
            rows.append(ids)
            placed.append(row)
        return rows, placed


class TokenLabels(LabelOutputs):
    # From a file to a batch.

    # As for one label a text, and of each token one.
    shards = ShardFormat("token", ("input_ids", "labels"), label_column="labels")

    def columns_of(self, data: DataConfig, sources: Sequence[Source]) -> Columns:
        is_protein = data.prepare_text in PREPARATIONS
        return WordLabels((data.text_column,), label=data.label_column, is_protein=is_protein)

    def encoder(self, tokenizer: Tokenizer, examples: Examples, limits: RowLimits) -> Encoder:
        return WordLabelEncoder(tokenizer, examples, limits)

    def row(self, columns: Mapping[str, NDArray[Any]], key: int, settings: RowSettings) -> LabelledRow:
        row = super().row(columns, key, settings)
        tokens = len(row.input_ids)
        if len(row.labels) <= tokens:
            return row
        labels = row.labels[:tokens].copy()
        labels[-1] = np.nan if labels.dtype.kind == "f" else IGNORED_LABEL
        return replace(row, labels=labels)

    def ids_and_labels(
        self, encoder: TextEncoder, text: str, labels: Sequence[str | None]
    ) -> tuple[Ids, Sequence[str | None]]:
        ids, firsts = encoder.with_places(text, len(labels))
        of_tokens: list[str | None] = [None] * (len(ids) + 1)
        for first, label in zip(firsts.tolist(), labels, strict=True):
            if first >= 0:
                of_tokens[first] = label
        return ids, of_tokens

    def show(self, tokenizer: Tokenizer, ids: NDArray[Any], labels: Sequence[str | None]) -> Table:
        return aligned(tokenizer, ids, labels)

    # From a batch to a score.

    def labels_of(self, tokens: int) -> int:
        return tokens

    def label_column(self, names: Sequence[str]) -> str:
        return "labels" if names else "numbers"

    def encode(self, text: str, encoder: TextEncoder, longest: int, words: int | None = None) -> EncodedText:
        """With the places of its words, or of its letters: those of a protein, or of a single word with a token for
        each.
        """
        ids, first_tokens = encoder.with_places(text, words)
        if words is None and len(first_tokens) == 1 < len(text):
            with suppress(UserError):  # Where letters share a token, the word has one label.
                ids, first_tokens = encoder.with_places(text, len(text))
        is_cut = len(ids) >= longest
        ids = ids[: longest - 1]
        first_tokens = np.where(first_tokens < len(ids), first_tokens, -1)
        return EncodedText([*ids.tolist(), encoder.tokenizer.eos_id], is_cut, first_tokens)

    def answer(self, text: EncodedText, outputs: Outputs, names: Sequence[str]) -> LabelAnswer:
        """`labels` of the words or letters with the probability of each in `probabilities`, or `numbers`; null where
        none is.
        """
        assert text.first_tokens is not None
        of_tokens = [*predictions(outputs, names), None]  # What has no token, at -1, has no label.
        labels = [of_tokens[token] for token in text.first_tokens]
        columns: dict[str, Any] = {self.label_column(names): labels}
        if names:
            of_tokens = [*probabilities(outputs).max(-1).tolist(), None]
            columns["probabilities"] = [of_tokens[token] for token in text.first_tokens]
        return LabelAnswer(columns, in_line(labels, names))

    def prediction_rows(
        self, batch: Batch, outputs: Outputs, names: Sequence[str], tokenizer: Tokenizer
    ) -> Iterator[dict[str, Any]]:
        begin = 0
        for ids, length, labels in zip(batch.input_ids, batch.input_lengths.tolist(), batch.labels, strict=True):
            yield {
                "tokens": [tokenizer.id_to_token(number) for number in ids[:length].tolist()],
                "labels": cells(labels[:length], names),
                "predictions": predictions(outputs[begin : begin + length], names),
            }
            begin += length
