"""`BaseTask`: what a task can be asked, and the answers that most tasks give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import AnyRow, Batch, Row, collate
from data.batches.rows import Lengths, RowSettings
from data.prepare.encode import Encoder
from data.prepare.preview import cut_row, side_row, text_of_ids
from data.prepare.training_data import TrainingData
from data.shards.store import LengthFacts
from data.sources.columns import Columns
from data.sources.peek import Peek
from data.sources.source import Source
from data.task import RowLimits, ShardFormat, Table
from data.text.clean import Dropped
from data.text.conversations import Examples, TextRow
from data.text.templates import template_of
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import DataConfig, LoraConfig, PreferenceConfig, T5ModelConfig, TrainConfig
from settings.fields import AUTO
from support.language import say
from support.storage import Once

if TYPE_CHECKING:
    from engine.blockwise import Blockwise, Objective
    from model.micro_batch import MicroBatch
    from model.t5 import T5

Outputs = NDArray[np.float32]  # (R, L) of a head over labels, for each row or each token of all rows
Watch = Callable[[Batch, Outputs], None]


class Processes(Protocol):
    """The processes of a run, as far as scores are gathered over them."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        ...


class Scores:
    """What an evaluation counts beside its loss. A loss over text has nothing to count: its answers are scored
    apart.
    """

    def watch(self, batch: Batch, objective: Objective) -> None:
        """Count what an objective has seen of a batch."""

    def gather(self, processes: Processes) -> None:
        """Count what all processes have seen."""

    def result(self) -> dict[str, float]:
        """Score name -> value; empty where nothing was counted."""
        return {}

    def table(self) -> list[tuple[str, str]]:
        """Further rows for a table of scores."""
        return []


@dataclass(frozen=True)
class BaseTask:
    """A kind of work: which rows it reads, what is learnt from them, and how well that is done.

    Args:
        name: of the objective, a key of `settings.tasks.TASKS`.
    """

    name: str

    # From a file to a batch: what `data` calls, and so also in `data.task.TaskProtocol`.

    shards: ClassVar[ShardFormat]
    # Rows may be windows of all texts laid end to end:
    is_windowed: ClassVar[bool] = False
    # All rows may have the same lengths:
    has_even_lengths: ClassVar[bool] = False
    # The tokenizer may have to have <extra_id_0> and those after it:
    needs_sentinels: ClassVar[bool] = False
    # Prompts may be written with a template:
    uses_template: ClassVar[bool] = False
    # Files with these contents, by `data.sources.layouts`, are read without naming the task:
    contents: ClassVar[Sequence[str]] = ()
    examples_class: ClassVar[type[Examples]] = Examples

    @property
    def flags(self) -> str:
        """What `command` needs to train this task on its shards."""
        return ""

    def sample(self, cache_dir: str, once: Once) -> tuple[Path, Columns]:
        """The built-in data, where no file is named.

        Raises:
            UserError: there are none. NotMade: by `only_if_made`.
        """
        raise NotImplementedError

    def problems_unless_named(self, data: DataConfig, file: str) -> list[str]:
        """Why a file that suits this task may not decide for it, but `objective` must name it; empty: it may."""
        return []

    def columns_of(self, data: DataConfig, sources: Sequence[Source]) -> Columns:
        """The columns that rows are made of; the first of the sources decides where the settings do not."""
        raise NotImplementedError

    def column_flags(self, columns: Sequence[str]) -> Sequence[str]:
        """The flags, without --, that name these `Columns.sides`; none where everyone calls the columns so."""
        raise NotImplementedError

    def ineffective_settings(self, data: DataConfig, training_data: TrainingData) -> list[str]:
        """Settings that the user has named and that have no effect on these rows."""
        return []

    def tokenizer_type(self, training_data: TrainingData) -> str:
        """Which kind of tokenizer suits the texts."""
        return "bpe"

    def label_names(
        self, data: DataConfig, model: T5ModelConfig, training_data: TrainingData, once: Once
    ) -> tuple[str, ...] | None:
        """The names of labels, in their order; (): they are numbers to be predicted; None: there are no labels.

        Raises:
            UserError: the data cannot be read, or its labels are not names. NotMade: by `only_if_made`.
        """
        return None

    def examples(self, data: DataConfig, clean: bool, columns: Columns, tokenizer_dir: Path | None) -> Examples:
        """How rows become texts.

        Args:
            clean: whether texts are normalised, and rows left out that are not worth training on.
            tokenizer_dir: beside which a template may lie; None: prompts are not worded.
        Raises:
            UserError: the template is wrong.
        """
        template = template_of(data, tokenizer_dir) if self.uses_template and tokenizer_dir else None
        examples_class = columns.examples_class or self.examples_class
        return examples_class(clean, template, columns.form, data.expand_turns, data.prepare_text)

    def encoder(self, tokenizer: Tokenizer, examples: Examples, limits: RowLimits) -> Encoder:
        """How rows become ids."""
        return Encoder(tokenizer, examples, limits)

    def limits(self, data: DataConfig) -> RowLimits:
        """To which each stored column is cut."""
        lengths = self.lengths(data)
        return lengths.input_tokens, *[lengths.target_tokens] * (len(self.shards.columns) - 1)

    def shard_facts(self, data: DataConfig, columns: Columns) -> dict[str, object]:
        """What shapes the shards of this task, and not those of others."""
        lengths = self.lengths(data)
        return {"max_seq_len": lengths.input_tokens, "max_target_len": lengths.target_tokens}

    def refuse_dropped(self, dropped: Dropped, files: str) -> None:
        """Refuse data with rows that had to be left out; raises UserError."""

    def lengths(self, data: DataConfig, num_sentinels: int = 100) -> Lengths:
        """How long windows, inputs and targets get.

        With `max_target_len` auto, a target is as long as an input, or as the task needs it.
        """
        source = data.max_seq_len
        target = source if data.max_target_len == AUTO else int(data.max_target_len)
        return Lengths(min(source, source + target - 2), source, target)

    def rows_of(self, stored_rows: Sequence[dict[str, Any]], lengths: Lengths) -> Sequence[dict[str, Any]]:
        """The rows that stored ones are read as."""
        return stored_rows

    def part_rows(self, parts: Sequence[Mapping[str, Any]], rows: Sequence[dict[str, Any]]) -> list[int]:
        """How many of `rows_of` belong to each part of the data, as a manifest lists these."""
        return [part["rows"] for part in parts]

    def longest(
        self, column_lengths: Mapping[str, LengthFacts], rows: Sequence[dict[str, Any]], settings: RowSettings
    ) -> tuple[int, ...]:
        """Encoder tokens, and the decoder tokens of each answer, of the longest rows that can come."""
        inputs, *targets = (int(facts["longest"]) for facts in column_lengths.values())
        bounds = settings.lengths
        return min(inputs, bounds.input_tokens), *(min(target, bounds.target_tokens) for target in targets)

    def stored_lengths(
        self, columns: Sequence[NDArray[np.int64]], settings: RowSettings
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Encoder and decoder tokens of rows, (rows,) each, by the lengths of their stored columns."""
        inputs, *targets = columns
        bounds = settings.lengths
        answers = [np.minimum(target, bounds.target_tokens) for target in targets]
        return np.minimum(inputs, bounds.input_tokens), np.sum(answers, axis=0)

    def row(self, columns: Mapping[str, NDArray[Any]], key: int, settings: RowSettings) -> AnyRow:
        """One row of a batch.

        Args:
            columns: one of `rows_of`. key: 64 bits that fix every random choice.
        """
        raise NotImplementedError

    def collate(self, rows: Sequence[Row], pad_token_id: int) -> Batch:
        """Rows as one rectangle."""
        return collate(rows, pad_token_id)

    def token_lengths(
        self, tokenizer: Tokenizer, examples: Examples, rows: Sequence[TextRow], model: T5ModelConfig
    ) -> list[NDArray[np.int64]]:
        """Tokens of the encoder, and of each answer of the decoder, before rows are cut: (rows,) each. Where a row has
        several texts, those of the encoder are (texts, rows), 0 for what a row does not have.
        """
        return self.encoder(tokenizer, examples, (None,) * len(self.shards.columns))(rows).uncut

    def length_title(self, column: str) -> str | None:
        """What the lengths of a stored column are called; None where they are of no interest."""
        return say("tokens of {column}", column=column)

    def limit_flags(self, data: DataConfig, cut_rows: int) -> str:
        """The flags to which rows are cut, for people; empty where nothing is told of it."""
        lengths = self.lengths(data)
        return say(
            "--max_seq_len={input} or --max_target_len={target}",
            input=lengths.input_tokens,
            target=lengths.target_tokens,
        )

    def show_labels(self, names: Sequence[str], counts: Sequence[int]) -> Table:
        """The labels of prepared data, for a table."""
        return []

    def show_batch(self, batch: Batch, tokenizer: Tokenizer, label_names: Sequence[str]) -> Table:
        """A batch of one row, for a table."""
        sides = [batch.input_ids[0, : batch.input_lengths[0]]]
        sides += [labels[:length] for labels, length in zip(batch.labels, batch.target_lengths, strict=True)]
        return [side_row(number, text_of_ids(tokenizer, ids), len(ids)) for number, ids in enumerate(sides)]

    def show_rows(
        self, data: DataConfig, peek: Peek, count: int, examples: Examples, tokenizer: Tokenizer | None
    ) -> Table:
        """The first `count` rows of files, for a table; without a tokenizer their texts, as the encoder would get
        them.
        """
        if tokenizer is None:
            texts = examples.usable(peek.rows).texts[:count]
            return [side_row(number, text) for row in texts for number, text in enumerate(row)]
        encoded = self.encoder(tokenizer, examples, self.limits(data))(peek.rows)
        sides = [np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in encoded.columns]
        rows = list(zip(*sides, strict=True))[: encoded.num_rows]
        table = [
            side_row(number, tokenizer.decode_answer(ids), len(ids))
            for row in rows[:count]
            for number, ids in enumerate(row)
        ]
        is_cut = [before > after for before, (_, after) in zip(encoded.uncut, encoded.columns, strict=True)]
        cut_rows = int(np.any(is_cut, axis=0).sum())
        return table + cut_row(self.limit_flags(data, cut_rows), cut_rows, encoded.num_rows, of_first=True)

    # From a batch to a score: what training, evaluation and answers ask.

    answers_per_row: ClassVar[int] = 1
    # `evaluate` answers so many rows where nobody says how many:
    answered_rows: ClassVar[int] = 0
    # Names of what evaluations of the loss count beside it:
    scores: ClassVar[tuple[str, ...]] = ()
    has_perplexity: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True
    # Whether a run has to start from a trained model:
    needs_base: ClassVar[bool] = False

    def run_kind(self, is_finetune: bool) -> str:
        """What kind of run learns it: one of `training.checkpoints.runs.KINDS`."""
        return "finetune" if is_finetune else "pretrain"

    def leads_to_finetuning(self, is_finetune: bool) -> bool:
        """Whether the model of such a run is there to be finetuned next."""
        return not is_finetune

    def origin(self, is_new: bool) -> str:
        """How a model came to be, for its card.

        Args:
            is_new: whether it began with random weights.
        """
        return "pretrained from scratch" if is_new else "trained further"

    def longest_target(self, data: DataConfig, source_tokens: int, has_decoder: bool) -> int:
        """Decoder tokens of the longest row that the settings allow, all its answers together."""
        if data.max_target_len != AUTO:
            return self.answers_per_row * int(data.max_target_len)
        return self.answers_per_row * math.ceil(source_tokens * self.target_share(data))

    def target_share(self, data: DataConfig) -> float:
        """Target tokens for each source token where no longest target is named."""
        return 1.0

    def rate_share(self, has_adapters: bool) -> float | None:
        """The part of an optimizer's learning rate that suits it whatever the model; None: that depends on the
        model.
        """
        return None

    def has_reference(self, preference: PreferenceConfig) -> bool:
        """Whether a reference model sees the rows too."""
        return False

    def stores_reference(self, train: TrainConfig, preference: PreferenceConfig, lora: LoraConfig) -> bool:
        """Whether what the reference model says of the rows is computed before the run; `finetune_from` is resolved."""
        return False

    def objective(self, model: T5, train: TrainConfig, preference: PreferenceConfig, lora: LoraConfig) -> Objective:
        """What a step minimises: here the cross-entropy of each target token.

        Args:
            model: with its adapters on, if there are any.
        """
        from engine.blockwise import Objective

        return Objective()

    def random_batch(
        self, lengths: Sequence[tuple[int, int]], model: T5ModelConfig, random: np.random.Generator, has_reference: bool
    ) -> Batch:
        """A batch of random ids, to measure what a step takes.

        Args:
            lengths: source and target tokens of each row. has_reference: whether rows bring what a reference model
                says.
        """
        keys = random_keys(random, len(lengths))
        rows = [
            Row(random_ids(random, model, source), random_ids(random, model, target), key)
            for (source, target), key in zip(lengths, keys, strict=True)
        ]
        return collate(rows, model.pad_token_id)

    def predicted(
        self,
        blockwise: Blockwise,
        batch: Batch,
        micro_batch: MicroBatch,
        tokenizer: Tokenizer,
        names: Sequence[str],
    ) -> tuple[str, str]:
        """What the head of a model says of a batch of one row, and what the data says, as text for the screen.

        Args:
            micro_batch: the batch on the device. names: of the labels.
        """
        raise NotImplementedError

    def new_scores(self, names: Sequence[str], write: Watch | None = None) -> Scores:
        """What counts scores while the loss is measured.

        Args:
            names: of the labels, in the order of the outputs; none: labels are numbers.
            write: gets each batch and the head's outputs as well.
        """
        return Scores()

    def scores_bytes(self, texts: int, model: T5ModelConfig) -> int:
        """What these scores hold at the highest of an evaluation of so many texts, where that grows with them."""
        return 0


def random_ids(random: np.random.Generator, model: T5ModelConfig, count: int) -> NDArray[np.int64]:
    """So many ids of a vocabulary, neither padding nor end of text in the usual ones."""
    return random.integers(2, max(3, model.vocab_size), count)


def random_keys(random: np.random.Generator, count: int) -> list[int]:
    """Keys of so many rows."""
    keys: list[int] = random.integers(2**62, size=count).tolist()
    return keys


if TYPE_CHECKING:
    from data.task import TaskProtocol

    def _has_what_data_calls(task: BaseTask) -> TaskProtocol:
        return task  # mypy checks here that `BaseTask` has every member of the protocol.
