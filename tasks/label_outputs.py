"""What tasks with labels of texts, or of their words or letters, share: rows, loss, scores and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import IGNORED_LABEL, Batch, LabelledBatch, LabelledRow, collate_labels, flat_labels
from data.batches.rows import RowSettings
from data.prepare.encode import Column, Counts, Encoder, TextEncoder, lengths_of_rows
from data.prepare.label_names import label_names
from data.prepare.preview import SHOWN_COLUMNS, shown, side_row
from data.prepare.training_data import TrainingData
from data.shards.store import LengthFacts
from data.sources.columns import Columns
from data.sources.peek import Peek, peek
from data.sources.relevance import BESIDE_QUERY
from data.task import RowLimits, Table
from data.text.conversations import Examples, TextRow, Usable
from data.text.templates import Turn
from data.tokenizers.backends import Ids
from data.tokenizers.tokenizer import Tokenizer
from settings.consistency import CLASS_SCORES, NUMBER_SCORES
from settings.declared import DataConfig, LoraConfig, PreferenceConfig, T5ModelConfig, TrainConfig
from settings.errors import UserError
from settings.fields import counted
from support.language import join, say
from support.storage import Once
from support.terminal import width
from tasks.base import BaseTask, Outputs, Scores, Watch, random_ids, random_keys

if TYPE_CHECKING:
    from engine.blockwise import Blockwise, Objective
    from model.micro_batch import MicroBatch
    from model.t5 import T5

DIGITS = 6  # Probabilities are rounded to so many digits.
NO_LABEL = "-"  # It is shown for a token without a label, or with a masked one.
SAMPLED_TEXTS = 64  # The first texts tell whether they are proteins.
Cell = str | float | None  # a name or a number; None: there is none
Labels = NDArray[np.float64]  # of one text, NaN where none is trained


@dataclass(frozen=True)
class EncodedText:
    """A text for a head over labels.

    Args:
        ids: its token ids, with end of text.
        is_cut: whether tokens were cut off, since the text was longer than the limit.
        first_tokens: where the first token of each letter or word stands; -1 where it has none. None: the text has one
            label.
    """

    ids: list[int]
    is_cut: bool = False
    first_tokens: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class LabelAnswer:
    """What a head says of a text.

    Args:
        columns: of a JSON line.
        line: for the screen.
    """

    columns: dict[str, Any]
    line: str


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
        inputs = self.ended(ids, uncut, self.limits[0])  # Cut, with end of text.
        counts = np.array([len(row) for row in labels], np.int64)
        flat = np.concatenate([*labels, np.zeros(0)])
        return [inputs, (flat, counts)], [uncut, counts], self.unknown(ids)

    def label(self, texts: Sequence[str], labels: Sequence[list[float | None]]) -> tuple[list[Ids], list[Labels]]:
        """The ids of texts, and the labels of each as they are stored."""
        encoder = TextEncoder(self.tokenizer, self.examples.prepare)
        return encoder.encode(texts), [np.array(row, float) for row in labels]


class LabelOutputs(BaseTask):
    """A task whose rows are texts with labels, and whose model has a head over labels."""

    # From a file to a batch.

    examples_class = LabelledExamples

    @property
    def flags(self) -> str:
        return f" --head={self.name}"

    def sample(self, cache_dir: str, once: Once) -> tuple[Path, Columns]:
        raise UserError("--train_file = none, --head={asked} needs texts with labels; give a file", asked=self.name)

    def problems_unless_named(self, data: DataConfig, file: str) -> list[str]:
        problem = "--train_file = {path}, holds texts with labels for --head={kind}; name this head"
        return [say(problem, path=file, kind=self.name)]

    def column_flags(self, columns: Sequence[str]) -> Sequence[str]:
        if list(columns) == ["text", "label"] or columns[0].startswith(BESIDE_QUERY):
            return ()
        return ("text_column", "label_column")

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
        self, column_lengths: Mapping[str, LengthFacts], rows: Sequence[dict[str, Any]], settings: RowSettings
    ) -> tuple[int, ...]:
        tokens = min(int(column_lengths["input_ids"]["longest"]), settings.lengths.input_tokens)
        return tokens, tokens if settings.decodes else 0

    def stored_lengths(
        self, columns: Sequence[NDArray[np.int64]], settings: RowSettings
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens = np.minimum(columns[0], settings.lengths.input_tokens)
        return tokens, np.minimum(columns[0] * settings.decodes, settings.lengths.target_tokens)

    def row(self, columns: Mapping[str, NDArray[Any]], key: int, settings: RowSettings) -> LabelledRow:
        labels = columns["labels"]
        labels = labels if labels.dtype.kind == "f" else labels.astype(np.int64)
        return LabelledRow(settings.input(columns["input_ids"]), labels, key, settings.decodes)

    def collate(self, rows: Sequence[LabelledRow], pad_token_id: int) -> LabelledBatch:  # type: ignore[override]
        return collate_labels(rows, pad_token_id)

    def token_lengths(
        self, tokenizer: Tokenizer, examples: Examples, rows: Sequence[TextRow], model: T5ModelConfig
    ) -> list[NDArray[np.int64]]:
        texts = [text for text, _ in examples.usable(rows).texts]
        tokens = lengths_of_rows(TextEncoder(tokenizer, examples.prepare).encode(texts))
        return [tokens, tokens * (model.num_decoder_layers > 0)]

    def length_title(self, column: str) -> str | None:
        return None if column == self.shards.label_column else super().length_title(column)

    def limit_flags(self, data: DataConfig, cut_rows: int) -> str:
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
        for text, cell in examples.usable(peek.rows).texts[:count]:
            labels = json.loads(cell)
            if tokenizer is None:
                table += [side_row(0, text), self.show_words(labels)]
            else:
                ids, token_labels = self.ids_and_labels(TextEncoder(tokenizer, examples.prepare), text, labels)
                table += self.show(tokenizer, np.append(ids, tokenizer.eos_id), token_labels)
        return table

    def ids_and_labels(
        self, encoder: TextEncoder, text: str, labels: Sequence[str | None]
    ) -> tuple[Ids, Sequence[str | None]]:
        """The ids of a text, without end of text, and the labels to show with them."""
        raise NotImplementedError

    def show_words(self, labels: Sequence[str | None]) -> tuple[str, str]:
        """The labels of a text, for a table."""
        return say("labels"), shown(" ".join(label or NO_LABEL for label in labels))

    def show(self, tokenizer: Tokenizer, ids: NDArray[Any], labels: Sequence[str | None]) -> Table:
        """A text with its labels, for a table."""
        raise NotImplementedError

    # From a batch to a score.

    scores: ClassVar[tuple[str, ...]] = (*CLASS_SCORES, *NUMBER_SCORES)
    has_perplexity: ClassVar[bool] = False
    writes_text: ClassVar[bool] = False

    def run_kind(self, is_finetune: bool) -> str:
        return "finetune"

    def leads_to_finetuning(self, is_finetune: bool) -> bool:
        return False

    def origin(self, is_new: bool) -> str:
        return "trained from scratch" if is_new else "finetuned"

    def longest_target(self, data: DataConfig, source_tokens: int, has_decoder: bool) -> int:
        """A decoder reads what the encoder reads."""
        return source_tokens if has_decoder else 0

    def objective(self, model: T5, train: TrainConfig, preference: PreferenceConfig, lora: LoraConfig) -> Objective:
        """Cross-entropy of classes, or the squared error of numbers."""
        from engine.objectives.labels import LabelObjective

        assert model.label_head is not None
        weights = train.class_weights
        classes = None if weights is None else tuple(float(word) for word in weights.split(","))
        return LabelObjective(model.label_head, classes, model.config.dropout_rate)

    def random_batch(
        self, lengths: Sequence[tuple[int, int]], model: T5ModelConfig, random: np.random.Generator, has_reference: bool
    ) -> Batch:
        """Texts with random labels; a decoder reads those that have target tokens."""
        keys = random_keys(random, len(lengths))
        rows = list[LabelledRow]()
        for (source, target), key in zip(lengths, keys, strict=True):
            count = self.labels_of(source)
            labels = random.integers(0, 2, count) if model.label_names else random.random(count, np.float32)
            rows.append(LabelledRow(random_ids(random, model, source), labels, key, target > 0))
        return collate_labels(rows, model.pad_token_id)

    def unlabelled_batch(self, texts: Sequence[EncodedText], model: T5ModelConfig) -> Batch:
        """Texts whose labels are to be predicted."""
        reads_twice = model.num_decoder_layers > 0
        rows = [
            LabelledRow(np.array(text.ids, np.int64), np.zeros(self.labels_of(len(text.ids)), np.int64), 0, reads_twice)
            for text in texts
        ]
        return collate_labels(rows, model.pad_token_id)

    def new_scores(self, names: Sequence[str], write: Watch | None = None) -> Scores:
        from tasks.label_scores import LabelScores

        return LabelScores(names, write)

    def labels_of(self, tokens: int) -> int:
        """How many outputs the head gives for a text of so many tokens, end of text included."""
        raise NotImplementedError

    def label_column(self, names: Sequence[str]) -> str:
        """The name of the column that holds what is predicted: classes if they have `names`, else numbers."""
        raise NotImplementedError

    def encode(self, text: str, encoder: TextEncoder, longest: int, words: int | None = None) -> EncodedText:
        """A text as the model was trained on it.

        Args:
            longest: the most tokens, end of text included.
            words: the number of words if the text was joined from a list of words; None: it was not.
        """
        raise NotImplementedError

    def answer(self, text: EncodedText, outputs: Outputs, names: Sequence[str]) -> LabelAnswer:
        """The answer to a text, from the head's outputs: classes if they have `names`, else numbers."""
        raise NotImplementedError

    def prediction_rows(
        self, batch: Batch, outputs: Outputs, names: Sequence[str], tokenizer: Tokenizer
    ) -> Iterator[dict[str, Any]]:
        """For each row of a batch a JSON line with its predictions and its labels."""
        raise NotImplementedError

    def predicted(
        self,
        blockwise: Blockwise,
        batch: Batch,
        micro_batch: MicroBatch,
        tokenizer: Tokenizer,
        names: Sequence[str],
    ) -> tuple[str, str]:
        (logits,) = blockwise.predict([micro_batch])
        labels = cells(flat_labels(batch), names)
        of_all = predictions(logits.float().cpu().numpy(), names)
        predicted = [None if label is None else cell for cell, label in zip(of_all, labels, strict=True)]
        if len(labels) > 1:  # End of text has no label.
            predicted.pop()
            labels.pop()
        return in_line(predicted, names), in_line(labels, names)


def predictions(outputs: Outputs, names: Sequence[str]) -> list[Cell]:
    """The class of each row of outputs, or its number."""
    return cells(outputs.argmax(-1) if names else outputs[:, 0], names)


def cells(labels: NDArray[Any], names: Sequence[str]) -> list[Cell]:
    """Names of classes, or numbers; None where there is no label."""
    if names:
        return [None if label == IGNORED_LABEL else names[label] for label in labels.astype(np.int64).tolist()]
    # As few digits as tell float32 numbers apart:
    return [None if np.isnan(label) else float(str(label)) for label in labels]


def probabilities(outputs: Outputs) -> NDArray[np.float64]:
    """(R, L) of each class, from the head's outputs, as JSON lines have them."""
    powers = np.exp(outputs.astype(np.float64) - outputs.max(-1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(-1, keepdims=True)
    return shares.round(DIGITS)


def in_line(labels: Sequence[Cell], names: Sequence[str]) -> str:
    """Labels for the screen: side by side if each is one letter, otherwise separated by spaces."""
    are_letters = bool(names) and all(len(name) == 1 for name in names)
    words = [f"{label:.4g}" if isinstance(label, float) else label or NO_LABEL for label in labels]
    return ("" if are_letters else " ").join(words)


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
        cells = token, label or NO_LABEL
        columns = max(map(width, cells)) + 1
        columns_left -= columns
        if columns_left < 0:
            end = say(" ... ({count})", count=counted(len(ids), "token"))
            break
        lines = [line + cell + " " * (columns - width(cell)) for line, cell in zip(lines, cells, strict=True)]
    return [(say("tokens"), lines[0].rstrip() + end), (say("labels"), lines[1].rstrip())]
