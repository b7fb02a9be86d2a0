"""A prompt with two responses, of which one is better: DPO, IPO and ORPO."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from data.batches.collate import Batch, PreferenceRow, collate_preferences
from settings.declared import Config, PreferenceConfig, T5ModelConfig
from tasks.base import Task, random_ids, random_keys

if TYPE_CHECKING:
    from engine.blockwise import Objective
    from model.t5 import T5

# Preferences take far smaller steps than learning to write.
RATE_SHARE = 0.01
ADAPTER_RATE_SHARE = 0.1
WITHOUT_REFERENCE = "orpo"  # The loss that compares with no other model.


class Preferences(Task):
    # From a file to a batch.

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
        return preference.preference_loss != WITHOUT_REFERENCE

    def stores_reference(self, config: Config) -> bool:
        """Whether all weights are trained, or adapters that have been trained before.

        Adapters that begin at zero compare with the model without them: one more forward, no second model.
        """
        from model.formats.adapter_folder import is_adapter

        if not self.has_reference(config.preference):
            return False
        return not config.lora.lora_rank or is_adapter(str(config.train.finetune_from))

    def objective(self, model: T5, config: Config) -> Objective:
        """The preference loss of each pair of answers; adapters are taken off for a reference that is not stored."""
        from engine.objectives.preference import PreferenceLoss, PreferenceObjective
        from model.lora.adapter import adapters_off

        loss = PreferenceLoss(config.preference.preference_loss, config.preference.beta)
        return PreferenceObjective(loss, None if self.stores_reference(config) else partial(adapters_off, model))

    def random_batch(
        self, lengths: Sequence[tuple[int, int]], model: T5ModelConfig, random: np.random.Generator, has_reference: bool
    ) -> Batch:
        """Pairs of answers whose tokens together are those of the target."""
        keys = random_keys(random, len(lengths))
        reference = np.zeros(2, np.float32) if has_reference else None
        rows = [
            PreferenceRow(
                random_ids(random, model, source),
                random_ids(random, model, both - both // 2),
                random_ids(random, model, both // 2),
                key,
                reference,
            )
            for (source, both), key in zip(lengths, keys, strict=True)
        ]
        return collate_preferences(rows, model.pad_token_id)
