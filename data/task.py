"""What a task is for `data`: its protocol, how it stores rows, and which tasks there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from settings.declared import DataConfig, T5ModelConfig
from settings.tasks import TASKS, task_named

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from data.batches.collate import AnyRow, Batch
    from data.batches.rows import Lengths, RowSettings
    from data.prepare.encode import Encoder
    from data.prepare.training_data import TrainingData
    from data.shards.store import LengthFacts
    from data.sources.columns import Columns
    from data.sources.peek import Peek
    from data.sources.source import Source
    from data.text.clean import Dropped
    from data.text.conversations import Examples, TextRow
    from data.tokenizers.tokenizer import Tokenizer
    from support.storage import Once

Table = list[tuple[str, str]]  # rows of a table that is printed: (title, text)
RowLimits = tuple[int | None, ...]  # the most tokens of each stored column, end of text included; None: no limit


@dataclass(frozen=True)
class ShardFormat:
    """How rows are stored.

    Args:
        kind: the name of the format in a manifest.
        columns: names of the stored columns; the first holds the ids for the encoder.
        row_tokens: the rows are one stream of tokens, cut into pieces of this length; 0: each row is stored by itself.
        label_column: the column that holds labels rather than ids.
        has_targets: whether these are any number of float32 for a row, whatever its tokens.
    """

    kind: str
    columns: tuple[str, ...]
    row_tokens: int = 0
    label_column: str = ""
    has_targets: bool = False


class TaskProtocol(Protocol):
    """The members of `tasks.base.BaseTask` that `data` needs, for type checkers; `BaseTask` documents each of them.

    `tasks` imports `data`, so `data` may not import `BaseTask`, and declares here what it calls.
    """

    shards: ClassVar[ShardFormat]
    is_windowed: ClassVar[bool]
    has_even_lengths: ClassVar[bool]
    needs_sentinels: ClassVar[bool]
    uses_template: ClassVar[bool]
    contents: ClassVar[Sequence[str]]
    scores: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str: ...
    @property
    def flags(self) -> str: ...

    # Files to rows: which files and columns are read.

    def sample(self, cache_dir: str, once: Once) -> tuple[Path, Columns]: ...
    def problems_unless_named(self, data: DataConfig, file: str) -> list[str]: ...
    def columns_of(self, data: DataConfig, sources: Sequence[Source]) -> Columns: ...
    def column_flags(self, columns: Sequence[str]) -> Sequence[str]: ...
    def ineffective_settings(self, data: DataConfig, training_data: TrainingData) -> list[str]: ...
    def tokenizer_type(self, training_data: TrainingData) -> str: ...
    def label_names(
        self, data: DataConfig, model: T5ModelConfig, training_data: TrainingData, once: Once
    ) -> tuple[str, ...] | None: ...

    # Rows to stored ids:

    def examples(self, data: DataConfig, clean: bool, columns: Columns, tokenizer_dir: Path | None) -> Examples: ...
    def encoder(self, tokenizer: Tokenizer, examples: Examples, limits: RowLimits) -> Encoder: ...
    def limits(self, data: DataConfig) -> RowLimits: ...
    def shard_facts(self, data: DataConfig, columns: Columns) -> dict[str, object]: ...
    def refuse_dropped(self, dropped: Dropped, files: str) -> None: ...

    # Stored ids to a batch:

    def lengths(self, data: DataConfig, num_sentinels: int = 100) -> Lengths: ...
    def rows_of(self, stored_rows: Sequence[dict[str, Any]], lengths: Lengths) -> Sequence[dict[str, Any]]: ...
    def part_rows(self, parts: Sequence[Mapping[str, Any]], rows: Sequence[dict[str, Any]]) -> list[int]: ...
    def longest(
        self, column_lengths: Mapping[str, LengthFacts], rows: Sequence[dict[str, Any]], settings: RowSettings
    ) -> tuple[int, ...]: ...
    def stored_lengths(
        self, columns: Sequence[NDArray[np.int64]], settings: RowSettings
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    def row(self, columns: Mapping[str, NDArray[Any]], key: int, settings: RowSettings) -> AnyRow: ...
    def collate(self, rows: Sequence[Any], pad_token_id: int) -> Batch: ...

    # Tables and notes that are printed:

    def token_lengths(
        self, tokenizer: Tokenizer, examples: Examples, rows: Sequence[TextRow], model: T5ModelConfig
    ) -> list[NDArray[np.int64]]: ...
    def length_title(self, column: str) -> str | None: ...
    def limit_flags(self, data: DataConfig, cut_rows: int) -> str: ...
    def show_labels(self, names: Sequence[str], counts: Sequence[int]) -> Table: ...
    def show_batch(self, batch: Batch, tokenizer: Tokenizer, label_names: Sequence[str]) -> Table: ...
    def show_rows(
        self, data: DataConfig, peek: Peek, count: int, examples: Examples, tokenizer: Tokenizer | None
    ) -> Table: ...


def all_tasks() -> list[TaskProtocol]:
    """One task of each name."""
    return [task_named(name) for name in TASKS]


def shard_readers() -> dict[str, TaskProtocol]:
    """Kind of shards -> the first task that reads it."""
    return {task.shards.kind: task for task in reversed(all_tasks())}


def task_reading(contents: str) -> TaskProtocol:
    """The first task that lists these `contents`, as `data.sources.reading.what_it_teaches` returns them of a file."""
    return next(task for task in all_tasks() if contents in task.contents)
