"""How long are the rows of files that nobody has prepared? Some of them are encoded, and stand for all.

Where the tokenizer will be trained on these very rows, one that learns from half of the sample stands in for it, and the
other half is measured: it has seen less text, so it needs more tokens rather than fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from config import Config
from data.batches.objectives import lengths_of
from data.prepare.encode import Encoder
from data.prepare.task import Task, decide, examples_of, held_out_sources, tokenizer_folder
from data.shards.store import COLUMNS, STREAM
from data.sources.peek import about_rows, peek
from data.sources.reading import Row, check_columns
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import SMALLEST_VOCABULARY, train_tokenizer
from language import say
from settings.fields import counted
from storage import NotMade, only_if_made

SAMPLED_ROWS = 2048
TAUGHT_BYTES = 256 * 1024  # of the sample, that a tokenizer learns from
LARGEST_VOCABULARY = 32768  # of that tokenizer: a sample has no more to teach
TIMES_LONGER = 2  # than the longest row of the sample may one of the others be


@dataclass(frozen=True)
class SampledLengths:
    """Tokens of some rows before they are cut.

    Args:
        objective: what the rows teach. sources: (N,) of the encoder. targets: (A, N) of the decoder, of each answer of a row.
        is_everywhere: whether they are spread over all rows, or come from the beginning of files. is_all: whether there are no other rows, and their tokenizer is known.
        about_rows: about as many rows there are, of conversations with every answer one for each.
    """

    objective: str
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    is_everywhere: bool
    is_all: bool
    about_rows: int

    def cut(self, config: Config) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(N,) tokens of encoder and decoder as the settings cut rows; both answers of a preference count."""
        limits = lengths_of(config.data, self.objective)
        return np.minimum(self.sources, limits.input_tokens), np.minimum(self.targets, limits.target_tokens).sum(0)

    def longest(self, config: Config) -> tuple[int, int]:
        """What the longest of all rows is taken to have: more than the sample, as far as the settings allow it."""
        limits, times = lengths_of(config.data, self.objective), 1 if self.is_all else TIMES_LONGER
        targets = [min(times * int(part.max()), limits.target_tokens) for part in self.targets]
        return min(times * int(self.sources.max()), limits.input_tokens), sum(targets)

    def describe(self) -> str:
        """What was looked at, in some words."""
        rows = counted(len(self.sources), "row")
        if self.is_everywhere:
            return say("a sample of {rows} from everywhere in the data", rows=rows)
        return say("a sample of {rows} from the beginning of the data", rows=rows)


def sampled_lengths(config: Config) -> SampledLengths | None:
    """Encode some of the rows that the settings name; None where rows are cut out of a stream, or are shards.

    Raises:
        UserError: the data cannot be read, or lack a column. NotMade: the built-in sample is not there.
    Memory: up to 4 MiB of text, its tokens, and where no tokenizer is known what one learns from 256 KiB.
    """
    task = decide(config, only_if_made)
    if task.shards is not None:
        return None
    here = [
        source for source in (*task.sources, *held_out_sources(config.data)) if isinstance(source.path, Path)
    ]  # elsewhere each costs a journey
    check_columns(here, task.columns)
    if task.kind == STREAM:
        return None
    found = peek(task.sources, task.columns, SAMPLED_ROWS, config.data.max_samples)
    rows, is_all = found.rows, found.is_all
    try:
        folder = tokenizer_folder(config, task, only_if_made)
        tokenizer = Tokenizer.load(folder)
    except NotMade:
        folder, tokenizer = Path(config.data.cache_dir), _stand_in(config, task, rows)
        if config.tokenizer.tokenizer_type != "byte":  # which learns nothing
            rows, is_all = rows[1::2] or rows, False
    whole = (None,) * len(COLUMNS[task.kind])
    encoded = Encoder(tokenizer, examples_of(config, task.kind, task.columns, folder), whole)(rows)
    if not encoded.num_rows:
        return None
    sources, *targets = encoded.uncut
    count = about_rows(task.sources)
    count = min(count, config.data.max_samples or count) * encoded.num_rows // len(rows)
    return SampledLengths(task.objective, sources, np.stack(targets), found.is_everywhere, is_all, max(1, count))


def _stand_in(config: Config, task: Task, rows: Sequence[Row]) -> Tokenizer:
    """A tokenizer like the one that would be trained."""
    made, kind = examples_of(config, task.kind, task.columns, None), config.tokenizer.tokenizer_type
    size = max(SMALLEST_VOCABULARY[kind], min(config.model.vocab_size, LARGEST_VOCABULARY))
    return train_tokenizer((text for row in rows[::2] for text in made.texts(row)), kind, size, TAUGHT_BYTES)
