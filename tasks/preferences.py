"""A prompt with two responses, of which one is better: DPO, IPO and ORPO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import Batch, PreferenceBatch, PreferenceRow, collate_preferences
from data.batches.rows import RowSettings
from data.sources.columns import Columns
from data.sources.layouts import PREFERENCES, recognise
from data.sources.reading import head_of
from data.sources.source import Source
from data.task import ShardFormat
from data.text.clean import Dropped
from data.text.conversations import Examples, TextRow, turns_in
from data.text.preferences import answers_fault, check_answers
from data.text.templates import Turn
from settings.declared import DataConfig, LoraConfig, PreferenceConfig, T5ModelConfig, TrainConfig
from settings.errors import UserError
from settings.tasks import PREFERENCE_LOSSES
from support.language import say
from support.storage import Once
from tasks.base import BaseTask, random_ids, random_keys

if TYPE_CHECKING:
    from engine.blockwise import Objective
    from model.t5 import T5

# Preferences take far smaller steps than learning to write.
RATE_SHARE = 0.01
ADAPTER_RATE_SHARE = 0.1


class PreferenceExamples(Examples):
    """A row is one example: a prompt, its better and its worse response, and where it has some the turns before."""

    def unfit(self, texts: TextRow) -> str | None:
        return answers_fault(texts)

    def parts(self, row: TextRow) -> Iterator[tuple[list[Turn], TextRow]]:
        yield (turns_in(row), row[:3]) if len(row) > 3 else ([], row)


class Preferences(BaseTask):
    # From a file to a batch.

    shards = ShardFormat("preferences", ("input_ids", "chosen", "rejected"))
    uses_template = True
    contents = (PREFERENCES,)
    examples_class = PreferenceExamples

    def sample(self, cache_dir: str, once: Once) -> tuple[Path, Columns]:
        raise UserError("--train_file = none, preferences need a file with columns prompt, chosen, rejected; give it")

    def problems_unless_named(self, data: DataConfig, file: str) -> list[str]:
        problem = (
            "--train_file = {train_file}, contains preferences, two answers per prompt; train on both with "
            "the dpo command, or on the better one alone with --is_finetune=True "
            "--response_column={chosen_column}, from text"
        )
        return [say(problem, train_file=file, chosen_column=data.chosen_column)]

    def columns_of(self, data: DataConfig, sources: Sequence[Source]) -> Columns:
        columns = recognise(data, head_of(sources[0]), PREFERENCES) if sources else None
        return columns or Columns((data.prompt_column, data.chosen_column, data.rejected_column))

    def column_flags(self, columns: Sequence[str]) -> Sequence[str]:
        return () if columns[0] == "prompt" else ("prompt_column", "chosen_column", "rejected_column")

    def refuse_dropped(self, dropped: Dropped, files: str) -> None:
        check_answers(dropped, files)

    def row(self, columns: Mapping[str, NDArray[Any]], key: int, settings: RowSettings) -> PreferenceRow:
        chosen = settings.target(columns["chosen"])
        rejected = settings.target(columns["rejected"])
        return PreferenceRow(settings.input(columns["input_ids"]), chosen, rejected, key)

    def collate(self, rows: Sequence[PreferenceRow], pad_token_id: int) -> PreferenceBatch:  # type: ignore[override]
        return collate_preferences(rows, pad_token_id)

    # From a batch to a score.

    answers_per_row: ClassVar[int] = 2
    has_perplexity: ClassVar[bool] = False
    needs_base: ClassVar[bool] = True

    def run_kind(self, is_finetune: bool) -> str:
        return "dpo"

    def leads_to_finetuning(self, is_finetune: bool) -> bool:
        return False

    def origin(self, is_new: bool) -> str:
        return "trained with preferences"

    def rate_share(self, has_adapters: bool) -> float | None:
        return ADAPTER_RATE_SHARE if has_adapters else RATE_SHARE

    def has_reference(self, preference: PreferenceConfig) -> bool:
        return PREFERENCE_LOSSES[preference.preference_loss].has_reference

    def stores_reference(self, train: TrainConfig, preference: PreferenceConfig, lora: LoraConfig) -> bool:
        """Whether all weights are trained, or adapters that have been trained before.

        Adapters that begin at zero compare with the model without them: one more forward, no second model.
        """
        from model.formats.adapter_folder import is_adapter

        if not self.has_reference(preference):
            return False
        return not lora.lora_rank or is_adapter(str(train.finetune_from))

    def objective(self, model: T5, train: TrainConfig, preference: PreferenceConfig, lora: LoraConfig) -> Objective:
        """The preference loss of each pair of answers; adapters are taken off for a reference that is not stored."""
        from engine.objectives.preference import PreferenceLoss, PreferenceObjective
        from model.lora.adapter import adapters_off

        loss = PreferenceLoss(preference.preference_loss, preference.beta)
        is_stored = self.stores_reference(train, preference, lora)
        return PreferenceObjective(loss, None if is_stored else partial(adapters_off, model))

    def random_batch(
        self, lengths: Sequence[tuple[int, int]], model: T5ModelConfig, random: np.random.Generator, has_reference: bool
    ) -> Batch:
        """Pairs of answers whose tokens together are those of the target, nearly all of them in one: where both are
        padded to its length, that takes the most.
        """
        keys = random_keys(random, len(lengths))
        reference = np.zeros(2, np.float32) if has_reference else None
        rows = [
            PreferenceRow(
                random_ids(random, model, source),
                random_ids(random, model, max(1, both - 1)),
                random_ids(random, model, 1),
                key,
                reference,
            )
            for (source, both), key in zip(lengths, keys, strict=True)
        ]
        return collate_preferences(rows, model.pad_token_id)
