"""Texts that belong together or are more or less alike, or texts with vectors to become: embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import Batch, EmbeddingBatch, EmbeddingRow, collate_texts
from data.batches.rows import Lengths, RowSettings, cut
from data.prepare.encode import Column, Counts, Encoded, Encoder, TextEncoder, lengths_of_rows
from data.prepare.preview import side_row, text_of_ids
from data.prepare.training_data import TrainingData
from data.shards.store import LengthFacts
from data.sources.columns import Columns
from data.sources.embedding_columns import NO_NUMBER, USUAL_TEXTS, EmbeddingColumns, unpacked, vectors_in
from data.sources.peek import Peek
from data.sources.reading import head_of
from data.sources.source import Source
from data.task import RowLimits, ShardFormat, Table
from data.text.conversations import Examples, TextRow, Usable
from data.text.templates import Turn
from data.tokenizers.tokenizer import Tokenizer
from settings.consistency import EMBEDDING_SCORES
from settings.declared import DataConfig, LoraConfig, PreferenceConfig, T5ModelConfig, TrainConfig
from settings.errors import UserError
from support.language import say
from support.storage import Once
from tasks.base import BaseTask, Outputs, Scores, Watch, random_ids, random_keys

if TYPE_CHECKING:
    from engine.blockwise import Blockwise, Objective
    from model.micro_batch import MicroBatch
    from model.t5 import T5

DIGITS = 6  # Cosines are written with so many digits.
SMALLEST = 1e-12  # No vector counts as shorter.


@dataclass(frozen=True)
class EmbeddingExamples(Examples):
    """A row is a text, or a text, a list of those that belong to it, as JSON, and negatives; and `packed` numbers. Each
    text of the list makes an example of its own, so that none is a negative of another. Prompts are put before texts.

    Args:
        query_prompt: before the first text of a row. document_prompt: before the others.
    """

    query_prompt: str = ""
    document_prompt: str = ""

    def usable(self, rows: Sequence[TextRow]) -> Usable:
        usable = super().usable([row[:-1] for row in rows])
        for index, (number, texts) in enumerate(zip(usable.row_numbers, usable.texts, strict=True)):
            query, *documents = texts
            prompted = [self.query_prompt + query, *(self.document_prompt + text for text in documents)]
            usable.texts[index] = (*prompted, rows[number][-1])
        return usable

    def parts(self, row: TextRow) -> Iterator[tuple[list[Turn], TextRow]]:
        first, *others = row
        if not others:
            yield [], row
            return
        for positive in json.loads(others[0]):
            yield [], (first, positive, *others[1:])

    def texts(self, row: TextRow) -> list[str]:
        first, *others = row[:-1]
        return [first, *json.loads(others[0]), *others[1:]] if others else [first]


@dataclass(frozen=True)
class TextsEncoder(Encoder):
    """Rows of ids: the texts of a row one behind the other, each cut and with end of text, and its numbers."""

    def __call__(self, rows: Sequence[TextRow]) -> Encoded:
        encoded = super().__call__(rows)
        ids, lengths = encoded.columns[0]
        # Each text ends with an end of text.
        return replace(encoded, row_texts=_sums((ids == self.tokenizer.eos_id).astype(np.int64), lengths))

    def encode(self, usable: Usable) -> tuple[list[Column], list[Counts], Counts]:
        encoder = TextEncoder(self.tokenizer, self.examples.prepare)
        texts = [text for row in usable.texts for text in row[:-1]]
        # End of text tells the texts of a row apart, and so stands nowhere else.
        ids = [each[each != self.tokenizer.eos_id] for each in encoder.encode(texts)]
        flat, lengths = self.ended(ids, lengths_of_rows(ids), self.limits[0])
        counts = [len(row) - 1 for row in usable.texts]
        targets = [unpacked(row[-1]).astype(np.float64) for row in usable.texts]
        target_counts = np.array(list(map(len, targets)), np.int64)
        columns: list[Column] = [
            (flat, _sums(lengths, counts)),
            (np.concatenate([*targets, np.zeros(0)]), target_counts),
        ]
        uncut = [_sums(lengths_of_rows(ids), counts), target_counts]
        return columns, uncut, _sums(self.unknown(ids), counts)


def _sums(numbers: Counts, counts: Sequence[int] | Counts) -> Counts:
    """Sums of so many numbers each, end to end."""
    ends = np.cumsum([0, *counts])
    totals = np.cumsum([0, *numbers])
    sums: Counts = totals[ends[1:]] - totals[ends[:-1]]
    return sums


class Embedding(BaseTask):
    # From a file to a batch.

    shards = ShardFormat("embedding", ("input_ids", "labels"), label_column="labels", has_targets=True)

    @property
    def flags(self) -> str:
        return " --head=embedding"

    def sample(self, cache_dir: str, once: Once) -> tuple[Path, Columns]:
        raise UserError(
            "--train_file = none, --head=embedding needs pairs of texts, or texts with teacher embeddings; give a file"
        )

    def problems_unless_named(self, data: DataConfig, file: str) -> list[str]:
        return [say("--train_file = {path}, holds texts for --head={kind}; name this head", path=file, kind=self.name)]

    def columns_of(self, data: DataConfig, sources: Sequence[Source]) -> Columns:
        names = head_of(sources[0]).all_names if sources else ()
        return EmbeddingColumns.of_settings(data, names)

    def column_flags(self, columns: Sequence[str]) -> Sequence[str]:
        return ("text_column",)

    def ineffective_settings(self, data: DataConfig, training_data: TrainingData) -> list[str]:
        has_one_text = training_data.shards is not None or len(training_data.columns.texts) == 1
        return ["teacher_vectors"] if data.teacher_vectors is not None and not has_one_text else []

    def label_names(
        self, data: DataConfig, model: T5ModelConfig, training_data: TrainingData, once: Once
    ) -> tuple[str, ...]:
        """None: the targets of rows are numbers. Vectors to become must be as wide as those of the model."""
        width = 0 if data.teacher_vectors is None else len(next(vectors_in(data.teacher_vectors), ()))
        if width not in (0, model.vector_size):
            raise UserError(
                "--teacher_vectors = {file}, holds embeddings of dimension {width}, and the model's have {size}; "
                "give --embedding_size={width}",
                file=data.teacher_vectors,
                width=width,
                size=model.vector_size,
            )
        return ()

    def examples(self, data: DataConfig, clean: bool, columns: Columns, tokenizer_dir: Path | None) -> Examples:
        return EmbeddingExamples(
            clean,
            form=columns.form,
            prepare=data.prepare_text,
            query_prompt=data.query_prompt or "",
            document_prompt=data.document_prompt or "",
        )

    def encoder(self, tokenizer: Tokenizer, examples: Examples, limits: RowLimits) -> Encoder:
        return TextsEncoder(tokenizer, examples, limits)

    def limits(self, data: DataConfig) -> RowLimits:
        return data.max_seq_len, None

    def shard_facts(self, data: DataConfig, columns: Columns) -> dict[str, object]:
        facts: dict[str, object] = {
            "max_seq_len": data.max_seq_len,
            "prepare_text": data.prepare_text,
            "query_prompt": data.query_prompt,
            "document_prompt": data.document_prompt,
        }
        if data.teacher_vectors is not None:
            path = Path(data.teacher_vectors)
            if not path.is_file():
                raise UserError("--teacher_vectors = {file}, there is no such file", file=path)
            facts["teacher_vectors"] = [path.stat().st_size, path.stat().st_mtime_ns]
        return facts

    def lengths(self, data: DataConfig, num_sentinels: int = 100) -> Lengths:
        """A text is as long as an input may be, and a row as so many of them as rows usually have."""
        return Lengths(data.max_seq_len, data.max_seq_len * USUAL_TEXTS, 0)

    def longest(
        self, column_lengths: Mapping[str, LengthFacts], rows: Sequence[dict[str, Any]], settings: RowSettings
    ) -> tuple[int, ...]:
        return int(column_lengths["input_ids"]["longest"]), 0

    def stored_lengths(
        self, columns: Sequence[NDArray[np.int64]], settings: RowSettings
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return columns[0], np.zeros_like(columns[0])

    def row(self, columns: Mapping[str, NDArray[Any]], key: int, settings: RowSettings) -> EmbeddingRow:
        ids = columns["input_ids"].astype(np.int64)
        ends = np.flatnonzero(ids == settings.special.eos) + 1
        texts = np.split(ids, ends[:-1])
        longest = settings.lengths.raw_tokens
        return EmbeddingRow(
            [cut(text, longest, settings.special.eos) for text in texts], columns["labels"].astype(np.float32), key
        )

    def collate(self, rows: Sequence[EmbeddingRow], pad_token_id: int) -> EmbeddingBatch:  # type: ignore[override]
        return collate_texts(rows, pad_token_id)

    def token_lengths(
        self, tokenizer: Tokenizer, examples: Examples, rows: Sequence[TextRow], model: T5ModelConfig
    ) -> list[NDArray[np.int64]]:
        encoded = self.encoder(tokenizer, examples, (None, None))(rows)
        assert encoded.row_texts is not None
        ids, _ = encoded.columns[0]
        ends = np.flatnonzero(ids == tokenizer.eos_id) + 1
        has_text = np.arange(max(encoded.row_texts, default=0))[:, None] < encoded.row_texts
        # Texts are end to end, row after row.
        lengths = np.zeros(has_text.T.shape, np.int64)
        lengths[has_text.T] = np.diff(ends, prepend=0)
        return [lengths.T, np.zeros(len(encoded.row_texts), np.int64)]

    def length_title(self, column: str) -> str | None:
        return super().length_title(column) if column == "input_ids" else None

    def limit_flags(self, data: DataConfig, cut_rows: int) -> str:
        return f"--max_seq_len={data.max_seq_len}" if cut_rows else ""

    def show_batch(self, batch: Batch, tokenizer: Tokenizer, label_names: Sequence[str]) -> Table:
        table = [
            side_row(0, text_of_ids(tokenizer, ids[:length]), int(length))
            for ids, length in zip(batch.input_ids, batch.input_lengths, strict=True)
        ]
        assert isinstance(batch, EmbeddingBatch)
        return table + _shown_targets(batch.targets[0])

    def show_rows(
        self, data: DataConfig, peek: Peek, count: int, examples: Examples, tokenizer: Tokenizer | None
    ) -> Table:
        table: Table = []
        for row in examples.usable(peek.rows[:count]).texts:
            table += [side_row(0, text) for text in row[:-1]]
            table += _shown_targets(unpacked(row[-1]))
        return table

    # From a batch to a score.

    scores: ClassVar[tuple[str, ...]] = EMBEDDING_SCORES
    has_perplexity: ClassVar[bool] = False
    writes_text: ClassVar[bool] = False

    def run_kind(self, is_finetune: bool) -> str:
        return "finetune"

    def leads_to_finetuning(self, is_finetune: bool) -> bool:
        return False

    def origin(self, is_new: bool) -> str:
        return "trained from scratch" if is_new else "finetuned"

    def longest_target(self, data: DataConfig, source_tokens: int, has_decoder: bool) -> int:
        return 0

    def objective(self, model: T5, train: TrainConfig, preference: PreferenceConfig, lora: LoraConfig) -> Objective:
        """What the loss of a whole step asks of the vectors of its texts."""
        from engine.objectives.embedding import EmbeddingObjective

        return EmbeddingObjective.of(model, train)

    def random_batch(
        self, lengths: Sequence[tuple[int, int]], model: T5ModelConfig, random: np.random.Generator, has_reference: bool
    ) -> Batch:
        """Pairs of random texts whose tokens together are those of the source, each about half of them."""
        rows = [
            EmbeddingRow([random_ids(random, model, size) for size in _halves(source)], NO_NUMBER, key)
            for (source, _), key in zip(lengths, random_keys(random, len(lengths)), strict=True)
        ]
        return collate_texts(rows, model.pad_token_id)

    def predicted(
        self,
        blockwise: Blockwise,
        batch: Batch,
        micro_batch: MicroBatch,
        tokenizer: Tokenizer,
        names: Sequence[str],
    ) -> tuple[str, str]:
        """The second text with the cosine of its vector and that of the first."""
        assert isinstance(batch, EmbeddingBatch)
        (vectors,) = blockwise.embed([micro_batch])
        if len(vectors) == 1:
            return say("embedding of dimension {count}", count=vectors.shape[1]), ""
        first, second = vectors[:2].double().cpu().numpy()
        cosine = _cosine(first, second)
        text = text_of_ids(tokenizer, batch.input_ids[1, : batch.input_lengths[1]])
        score = batch.targets[0][0]
        return f"{cosine:.4f}  {text}", "" if np.isnan(score) else f"{score:.4f}"

    def new_scores(self, names: Sequence[str], write: Watch | None = None) -> Scores:
        from tasks.embedding_scores import EmbeddingScores

        return EmbeddingScores(write)

    def scores_bytes(self, texts: int, model: T5ModelConfig) -> int:
        from tasks.embedding_scores import held_bytes

        return held_bytes(texts, model.vector_size)

    def prediction_rows(
        self, batch: Batch, outputs: Outputs, names: Sequence[str], tokenizer: Tokenizer
    ) -> Iterator[dict[str, Any]]:
        """For each row of a batch a JSON line with its texts, the cosine of the first with each other one, and its
        score; of a text with a vector to become, the cosine of both.
        """
        assert isinstance(batch, EmbeddingBatch)
        texts = [
            tokenizer.decode_with_unknown(ids[:length])
            for ids, length in zip(batch.input_ids, batch.input_lengths, strict=True)
        ]
        begin = 0
        for count, targets in zip(batch.row_texts.tolist(), batch.targets, strict=True):
            vectors = outputs[begin : begin + count].astype(np.float64)
            others = vectors[1:] if count > 1 else targets[np.newaxis, : vectors.shape[1]].astype(np.float64)
            cosines = [_cosine(vectors[0], other) for other in others]
            row = {"texts": texts[begin : begin + count], "cosines": [round(cosine, DIGITS) for cosine in cosines]}
            begin += count
            yield row if len(targets) > 1 or np.isnan(targets[0]) else {**row, "score": float(str(targets[0]))}


def _cosine(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(one @ other) / max(float(np.sqrt((one @ one) * (other @ other))), SMALLEST)


def _halves(tokens: int) -> list[int]:
    return [size for size in (tokens - tokens // 2, tokens // 2) if size]


def _shown_targets(targets: NDArray[np.float32]) -> Table:
    if len(targets) > 1:
        return [(say("teacher embedding"), say("dimension {count}", count=len(targets)))]
    return [] if np.isnan(targets[0]) else [(say("score"), f"{targets[0]:.6g}")]
