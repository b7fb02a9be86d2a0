"""A prompt and its response, which may come as a conversation or with several right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import Row
from data.batches.rows import RowSettings
from data.prepare.training_data import TrainingData
from data.sources.columns import Columns
from data.sources.corpus import build_sample_corpus
from data.sources.layouts import CONVERSATIONS, PAIRS, recognise
from data.sources.reading import head_of
from data.sources.relevance import BESIDE_QUERY
from data.sources.source import Source
from data.task import ShardFormat
from data.text.conversations import ANSWERS, MESSAGES_COLUMNS
from settings.declared import DataConfig
from settings.fields import AUTO
from support.storage import Once
from tasks.base import BaseTask


class Pairs(BaseTask):
    # From a file to a batch.

    # Rows of evaluation may have further right answers behind the first, each with end of text.
    shards = ShardFormat("pairs", ("input_ids", "labels"))
    uses_template = True
    contents = (PAIRS, CONVERSATIONS)

    def sample(self, cache_dir: str, once: Once) -> tuple[Path, Columns]:
        return build_sample_corpus(cache_dir, once).pairs, Columns(("prompt", "response"))

    def columns_of(self, data: DataConfig, sources: Sequence[Source]) -> Columns:
        columns = recognise(data, head_of(sources[0]), PAIRS) if sources else None
        return columns or Columns((data.prompt_column, data.response_column), data.history_column or "")

    def column_flags(self, columns: Sequence[str]) -> Sequence[str]:
        if columns[0] in ("prompt", *MESSAGES_COLUMNS) or columns[0].startswith(BESIDE_QUERY):
            return ()
        return ("messages_column",) if len(columns) == 1 else ("prompt_column", "response_column")

    def ineffective_settings(self, data: DataConfig, training_data: TrainingData) -> list[str]:
        idle = []
        if data.messages_column != AUTO and data.history_column is not None:
            idle.append("history_column")
        has_turns = training_data.shards is not None or training_data.columns.form not in ("plain", ANSWERS)
        if data.expand_turns and not has_turns:
            idle.append("expand_turns")
        return idle

    def row(self, columns: Mapping[str, NDArray[Any]], key: int, settings: RowSettings) -> Row:
        answers = columns["labels"]
        ends = np.flatnonzero(answers == settings.special.eos)[:-1] + 1
        # Most rows have one answer, and splitting takes time.
        pieces = np.split(answers, ends) if len(ends) else [answers]
        first, *other_answers = map(settings.target, pieces)
        return Row(settings.input(columns["input_ids"]), first, key, other_answers)

    # From a batch to a score.

    answered_rows: ClassVar[int] = 256
