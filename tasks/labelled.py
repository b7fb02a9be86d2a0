"""What both tasks with labels share on the way from a file to a batch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.language import join, say
from common.storage import Once
from common.terminal import width
from data.batches.collate import IGNORED_LABEL, Batch, LabelledBatch, LabelledRow, collate_labels
from data.batches.rows import RowSettings
from data.prepare.encode import Column, Counts, Encoder, TextEncoder, lengths_of_rows
from data.prepare.label_names import label_names
from data.prepare.preview import SHOWN_COLUMNS, shown, side_row
from data.prepare.training_data import TrainingData
from data.shards.store import LengthFacts
from data.sources.columns import Columns
from data.sources.peek import Peek, peek
from data.task import RowLimits, Table
from data.text.conversations import Examples, TextRow, Usable
from data.text.templates import Turn
from data.tokenizers.backends import Ids
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import DataConfig, T5ModelConfig
from settings.errors import UserError
from settings.fields import counted
from tasks.base import Task

MASKED = "-"  # in place of a label that is not trained
SAMPLED_TEXTS = 64  # by which it is known whether texts are proteins
Labels = NDArray[np.float64]  # of one text, NaN where none is trained


class LabelledExamples(Examples):
    """A row is a text and JSON of its labels."""

    def parts(self, row: TextRow) -> Iterator[tuple[list[Turn], TextRow]]:
        yield [], row

    def texts(self, row: TextRow) -> list[str]:
        return [row[0]]


@dataclass(frozen=True)
class LabelEncoder(Encoder):
    """Rows of ids, and of labels."""

    def encode(self, usable: Usable) -> tuple[list[Column], list[Counts], Counts]:
        texts = [text for text, _ in usable.texts]
        ids, labels = self.label(texts, [json.loads(labels) for _, labels in usable.texts])
        uncut = lengths_of_rows(ids)
        inputs = self.ended(ids, uncut, self.limits[0])
        counts = np.array([len(row) for row in labels], np.int64)
        flat = np.concatenate([*labels, np.zeros(0)])
        return [inputs, (flat, counts)], [uncut, counts], self.unknown(ids)

    def label(self, texts: Sequence[str], labels: Sequence[list[float | None]]) -> tuple[list[Ids], list[Labels]]:
        """The ids of texts, and the labels of each as they are stored."""
        encoder = TextEncoder(self.tokenizer, self.examples.prepare)
        return encoder.encode(texts), [np.array(row, float) for row in labels]


class Labelled(Task):
    # From a file to a batch.

    examples_class = LabelledExamples

    @property
    def flags(self) -> str:
        return f" --head={self.name}"

    def sample(self, cache_dir: str, once: Once) -> tuple[Path, Columns]:
        raise UserError("--train_file = none, --head={asked} needs texts with labels; give a file", asked=self.name)

    def unless_named(self, data: DataConfig, file: str) -> list[str]:
        problem = "--train_file = {path}, holds texts with labels for --head={kind}; name this head"
        return [say(problem, path=file, kind=self.name)]

    def column_flags(self, columns: Sequence[str]) -> Sequence[str]:
        return () if list(columns) == ["text", "label"] else ("text_column", "label_column")

    def tokenizer_type(self, training_data: TrainingData) -> str:
        texts = [text for text, _ in peek(training_data.sources, training_data.columns, SAMPLED_TEXTS).rows]
        are_proteins = texts and all(text.isalpha() and text.isupper() and text.isascii() for text in texts)
        return "letters" if are_proteins else "bpe"

    def label_names(
        self, data: DataConfig, model: T5ModelConfig, training_data: TrainingData, once: Once
    ) -> tuple[str, ...] | None:
        return label_names(data, model, training_data, once)

    def encoder(self, tokenizer: Tokenizer, examples: Examples, limits: RowLimits) -> Encoder:
        return LabelEncoder(tokenizer, examples, limits)

    def limits(self, data: DataConfig) -> RowLimits:
        return data.max_seq_len, None

    def shard_facts(self, data: DataConfig, columns: Columns) -> dict[str, object]:
        return {"labels": columns.names, "prepare_text": data.prepare_text, "max_seq_len": data.max_seq_len}

    def longest(
        self, stored: Mapping[str, LengthFacts], rows: Sequence[dict[str, Any]], settings: RowSettings
    ) -> tuple[int, ...]:
        tokens = min(int(stored["input_ids"]["longest"]), settings.lengths.input_tokens)
        return tokens, tokens * settings.decodes

    def stored_lengths(
        self, columns: Sequence[NDArray[np.int64]], settings: RowSettings
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens = np.minimum(columns[0], settings.lengths.input_tokens)
        return tokens, np.minimum(columns[0] * settings.decodes, settings.lengths.target_tokens)

    def row(self, stored: Mapping[str, NDArray[Any]], key: int, settings: RowSettings) -> LabelledRow:
        labels = stored["labels"]
        labels = labels if labels.dtype.kind == "f" else labels.astype(np.int64)
        return LabelledRow(settings.input(stored["input_ids"]), labels, key, settings.decodes)

    def collate(self, rows: Sequence[LabelledRow], pad_token_id: int) -> LabelledBatch:  # type: ignore[override]
        return collate_labels(rows, pad_token_id)

    def token_lengths(
        self, tokenizer: Tokenizer, examples: Examples, rows: Sequence[TextRow], model: T5ModelConfig
    ) -> list[NDArray[np.int64]]:
        tokens = lengths_of_rows(TextEncoder(tokenizer, examples.prepare).encode([text for text, _ in rows]))
        return [tokens, tokens * (model.num_decoder_layers > 0)]

    def length_title(self, column: str) -> str | None:
        return None if column == self.shards.label_column else super().length_title(column)

    def limit_words(self, data: DataConfig, cut_rows: int) -> str:
        return f"--max_seq_len={data.max_seq_len}" if cut_rows else ""

    def show_labels(self, names: Sequence[str], counts: Sequence[int]) -> Table:
        cells = [f"{name} {count:,}" for name, count in zip(names, counts, strict=True)]
        return [(say("labels"), join(", ", cells) if cells else say("numbers (regression)"))]

    def show_batch(self, batch: Batch, tokenizer: Tokenizer, label_names: Sequence[str]) -> Table:
        ids = batch.input_ids[0, : batch.input_lengths[0]]
        return self.show(tokenizer, ids, [_name(label, label_names) for label in batch.labels[0][: len(ids)]])

    def show_rows(
        self, data: DataConfig, peek: Peek, count: int, examples: Examples, tokenizer: Tokenizer | None
    ) -> Table:
        table: Table = []
        for text, cell in peek.rows[:count]:
            labels = json.loads(cell)
            if tokenizer is None:
                table += [side_row(0, text), self.show_words(labels)]
            else:
                ids, placed = self.placed(TextEncoder(tokenizer, examples.prepare), text, labels)
                table += self.show(tokenizer, np.append(ids, tokenizer.eos_id), placed)
        return table

    def placed(self, encoder: TextEncoder, text: str, labels: Sequence[str | None]) -> tuple[Ids, Sequence[str | None]]:
        """The ids of a text, and its labels as they are shown."""
        raise NotImplementedError

    def show_words(self, labels: Sequence[str | None]) -> tuple[str, str]:
        """The labels of a text, for a table."""
        return say("labels"), shown(" ".join(label or MASKED for label in labels))

    def show(self, tokenizer: Tokenizer, ids: NDArray[Any], labels: Sequence[str | None]) -> Table:
        """A text with its labels, for a table."""
        raise NotImplementedError

    # From a batch to a score.


def _name(label: Any, names: Sequence[str]) -> str | None:
    """A stored label for people; None where none is trained."""
    if label.dtype.kind == "f":
        return None if np.isnan(label) else f"{label:.9g}"
    return None if label == IGNORED_LABEL else names[label]


def aligned(tokenizer: Tokenizer, ids: NDArray[Any], labels: Sequence[str | None]) -> Table:
    """Tokens over their labels, column by column, as many as fit on a line."""
    lines = ["", ""]
    columns_left = SHOWN_COLUMNS
    end = ""
    for number, label in zip(ids.tolist(), labels, strict=True):
        token = (tokenizer.id_to_token(number) or "").lstrip("▁Ġ") or "▁"
        cells = token, label or MASKED
        columns = max(map(width, cells)) + 1
        columns_left -= columns
        if columns_left < 0:
            end = say(" ... ({count})", count=counted(len(ids), "token"))
            break
        lines = [line + cell + " " * (columns - width(cell)) for line, cell in zip(lines, cells, strict=True)]
    return [(say("tokens"), lines[0].rstrip() + end), (say("labels"), lines[1].rstrip())]
