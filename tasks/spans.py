"""Text with some of it hidden: span corruption, UL2, prefix language modelling and denoising."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.batches import corruption
from data.batches.collate import Row
from data.batches.rows import Ids, Lengths, RowSettings
from data.dataset import TokenStream
from data.shards.store import LengthFacts
from data.sources.columns import Columns
from data.sources.corpus import build_sample_corpus
from data.sources.layouts import TEXT
from data.sources.source import Source
from data.task import RowLimits, ShardFormat
from data.text.proteins import PREPARATIONS
from settings.declared import DataConfig
from settings.fields import AUTO
from support.language import say
from support.storage import Once
from tasks.base import BaseTask

ROW_TOKENS = 512  # A stored row has so many.


class Spans(BaseTask):
    # From a file to a batch.

    # All documents stand one after the other, with end of text between them.
    shards = ShardFormat("stream", ("tokens",), row_tokens=ROW_TOKENS)
    is_windowed = True
    needs_sentinels = True
    contents = (TEXT,)

    def corrupt(self, tokens: Ids, random: np.random.Generator, settings: RowSettings) -> tuple[Ids, Ids]:
        """Input ids and labels of a window, (2 .. `settings.lengths.raw_tokens`,) ids."""
        raise NotImplementedError

    def sample(self, cache_dir: str, once: Once) -> tuple[Path, Columns]:
        return build_sample_corpus(cache_dir, once).text, Columns(("text",))

    def columns_of(self, data: DataConfig, sources: Sequence[Source]) -> Columns:
        return Columns((data.text_column,))

    def column_flags(self, columns: Sequence[str]) -> Sequence[str]:
        return () if columns[0] == "text" else ("text_column",)

    def limits(self, data: DataConfig) -> RowLimits:
        return (None,)

    def shard_facts(self, data: DataConfig, columns: Columns) -> dict[str, object]:
        return {"prepare_text": data.prepare_text} if data.prepare_text in PREPARATIONS else {}

    def rows_of(self, stored_rows: Sequence[dict[str, Any]], lengths: Lengths) -> Sequence[dict[str, Any]]:
        return TokenStream(stored_rows, lengths.raw_tokens)

    def part_rows(self, parts: Sequence[Mapping[str, Any]], rows: Sequence[dict[str, Any]]) -> list[int]:
        # A window belongs to the part that it begins in.
        ends = np.cumsum([part["tokens"] for part in parts])
        windows = np.minimum(-(-ends // _window_tokens(rows)), len(rows))
        return [int(count) for count in np.diff(windows, prepend=0)]

    def longest(
        self, column_lengths: Mapping[str, LengthFacts], rows: Sequence[dict[str, Any]], settings: RowSettings
    ) -> tuple[int, ...]:
        return settings.lengths.input_tokens, settings.lengths.target_tokens

    def row(self, columns: Mapping[str, NDArray[Any]], key: int, settings: RowSettings) -> Row:
        random = np.random.Generator(np.random.Philox(key=key))
        return Row(*self.corrupt(columns["tokens"], random, settings), key)

    def length_title(self, column: str) -> str | None:
        return say("tokens per text")

    def limit_flags(self, data: DataConfig, cut_rows: int) -> str:
        return ""

    # From a batch to a score.


class SpanCorruption(Spans):
    # From a file to a batch.

    has_even_lengths = True

    def corrupt(self, tokens: Ids, random: np.random.Generator, settings: RowSettings) -> tuple[Ids, Ids]:
        masking = settings.noise_density, settings.mean_noise_span
        return corruption.span_corruption(tokens, random, settings.special, *masking)

    def lengths(self, data: DataConfig, num_sentinels: int = 100) -> Lengths:
        target = None if data.max_target_len == AUTO else int(data.max_target_len)
        masking = data.noise_density, data.mean_noise_span_length
        return Lengths(*corruption.span_corruption_lengths(data.max_seq_len, *masking, num_sentinels, target))

    def longest(
        self, column_lengths: Mapping[str, LengthFacts], rows: Sequence[dict[str, Any]], settings: RowSettings
    ) -> tuple[int, ...]:
        masking = settings.noise_density, settings.mean_noise_span
        return corruption.corrupted_lengths(_window_tokens(rows), *masking, len(settings.special.sentinels))

    # From a batch to a score.

    def target_share(self, data: DataConfig) -> float:
        """The masked tokens, and a sentinel for each span of them."""
        return 1.3 * data.noise_density * (1 + 1 / data.mean_noise_span_length)


class UL2(Spans):
    def corrupt(self, tokens: Ids, random: np.random.Generator, settings: RowSettings) -> tuple[Ids, Ids]:
        return corruption.ul2(tokens, random, settings.special, settings.lengths)

    def lengths(self, data: DataConfig, num_sentinels: int = 100) -> Lengths:
        raw = data.max_seq_len - 1
        target = corruption.ul2_target_tokens(raw, num_sentinels)
        if data.max_target_len != AUTO:
            target = int(data.max_target_len)
        return Lengths(raw, data.max_seq_len, target)


class Prefix(Spans):
    needs_sentinels = False

    def corrupt(self, tokens: Ids, random: np.random.Generator, settings: RowSettings) -> tuple[Ids, Ids]:
        return corruption.prefix_lm(tokens, random, settings.special, settings.lengths)


class Denoising(Spans):
    has_even_lengths = True

    def corrupt(self, tokens: Ids, random: np.random.Generator, settings: RowSettings) -> tuple[Ids, Ids]:
        return corruption.denoising(tokens, random, settings.special, settings.noise_density)

    def lengths(self, data: DataConfig, num_sentinels: int = 100) -> Lengths:
        longest = data.max_seq_len
        if data.max_target_len != AUTO:
            longest = min(longest, int(data.max_target_len))
        return Lengths(longest - 1, longest, longest)

    def longest(
        self, column_lengths: Mapping[str, LengthFacts], rows: Sequence[dict[str, Any]], settings: RowSettings
    ) -> tuple[int, ...]:
        tokens = _window_tokens(rows) + 1
        return tokens, tokens


def _window_tokens(rows: Sequence[dict[str, Any]]) -> int:
    return len(rows[0]["tokens"])
