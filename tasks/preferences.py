"""A prompt with two responses, of which one is better: DPO, IPO and ORPO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from data.batches.collate import PreferenceBatch, PreferenceRow, collate_preferences
from data.batches.rows import RowSettings
from data.sources.files import Source
from data.sources.layouts import Columns
from data.sources.reading import head_of
from data.sources.shapes import preference_columns
from data.task import Match, ShardFormat
from data.text.clean import Dropped
from data.text.conversations import Examples, TextRow, turns_in
from data.text.preferences import answers_fault, check_answers
from data.text.templates import Turn
from formats import TEXT
from language import say
from settings.declared import DataConfig
from settings.errors import UserError
from storage import Once
from tasks.base import Task


class PreferenceExamples(Examples):
    """A row is one example: a prompt, its better and its worse response, and where it has some the turns before."""

    def unfit(self, texts: TextRow) -> str | None:
        return answers_fault(texts)

    def parts(self, row: TextRow) -> Iterator[tuple[list[Turn], TextRow]]:
        yield (turns_in(row), row[:3]) if len(row) > 3 else ([], row)


class Preferences(Task):
    # From a file to a batch.

    shards = ShardFormat("preferences", ("input_ids", "chosen", "rejected"))
    command = "dpo"
    words_prompts = True
    examples_class = PreferenceExamples

    def sample(self, cache_dir: str, once: Once) -> tuple[Path, Columns]:
        raise UserError("--train_file = none, preferences need a file with columns prompt, chosen, rejected; give it")

    def recognise(self, data: DataConfig, source: Source) -> Match | None:
        columns = _recognised(data, source)
        if columns is None:
            return None
        # Beside a text, both answers stand under no prompt of their own.
        names = head_of(source).names
        is_certain = data.prompt_column in names or data.text_column not in names
        return Match(3, self.name, "preferences", columns) if is_certain else None

    def unless_named(self, data: DataConfig) -> str:
        return say(
            "--train_file = {train_file}, holds preferences, two answers a prompt; learn them with the dpo "
            "command, or one alone with --is_finetune=True --response_column={chosen_column}, from text",
            train_file=data.train_file,
            chosen_column=data.chosen_column,
        )

    def columns_of(self, data: DataConfig, sources: Sequence[Source]) -> Columns:
        if sources and (columns := _recognised(data, sources[0])) is not None:
            return columns
        return Columns((data.prompt_column, data.chosen_column, data.rejected_column))

    def column_flags(self, columns: Sequence[str]) -> Sequence[str]:
        return () if columns[0] == "prompt" else ("prompt_column", "chosen_column", "rejected_column")

    def refuse_dropped(self, dropped: Dropped, files: str) -> None:
        check_answers(dropped, files)

    def row(self, stored: Mapping[str, NDArray[Any]], key: int, settings: RowSettings) -> PreferenceRow:
        chosen = settings.target(stored["chosen"])
        rejected = settings.target(stored["rejected"])
        return PreferenceRow(settings.input(stored["input_ids"]), chosen, rejected, key)

    def collate(self, rows: Sequence[PreferenceRow], pad_token_id: int) -> PreferenceBatch:  # type: ignore[override]
        return collate_preferences(rows, pad_token_id)

    # From a batch to a score.


def _recognised(data: DataConfig, source: Source) -> Columns | None:
    if source.kind == TEXT:
        return None
    head = head_of(source)
    return preference_columns(data, head.names, head.sample)
