"""What a look at the first rows says before they are prepared: how long they are, and whether a tokenizer suits them.

Where the tokenizer is not trained yet, one that learns from every other row stands in for it, and the rows between are
measured: it has seen less text, so it needs more tokens rather than fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.batches.rows import lengths_of
from data.prepare.data_tokenizer import first_chars, tokenizer_folder, tokenizer_type_of
from data.prepare.training_data import TrainingData, find_training_data, held_out_sources
from data.shards.store import Manifest
from data.sources.peek import Peek, about_rows, peek
from data.sources.reading import check_columns
from data.tokenizers.tokenizer import Tokenizer, quality
from data.tokenizers.training import SMALLEST_VOCABULARY, train_tokenizer
from language import say
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO, counted
from storage import NotMade, only_if_made

SAMPLED_ROWS = 2048
SAMPLE_CHARS = 256 * 1024  # of them that a tokenizer is measured on
TAUGHT_BYTES = 256 * 1024  # that one learns from
LARGEST_VOCABULARY = 32768  # of that one: a sample has no more to teach
TIMES_LONGER = 2  # than the longest row of the sample may one of the others be
MOST_LOST = 1e-3  # of the tokens may stand for what the vocabulary cannot spell
MOST_TIMES = 3.0  # as many tokens as a tokenizer trained on the data needs


@dataclass(frozen=True)
class LengthEstimate:
    """Tokens of the first rows before they are cut.

    Args:
        objective: what the rows teach. sources: (N,) of the encoder. targets: (A, N) of the decoder, of each answer of a row.
        is_all: whether there are no other rows, and their tokenizer is known.
        about_rows: about as many rows there are, of conversations with every answer one for each. held_out_rows: likewise of files to
            validate with; 0: rows are held out, or such files are elsewhere.
        vocabulary: ids of the tokenizer; 0: they depend on rows that were not looked at.
    """

    objective: str
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    is_all: bool
    about_rows: int
    held_out_rows: int = 0
    vocabulary: int = 0

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
        rows = counted(len(self.sources), "row")
        return say("all {rows}", rows=rows) if self.is_all else say("the first {rows} of the data", rows=rows)


def estimate_lengths(config: Config) -> LengthEstimate | None:
    """Encode the first of the rows that the settings name; None where rows are cut out of a stream, or are shards.

    Raises:
        UserError: the data cannot be read, or lack a column. NotMade: the built-in sample is not there.
    Memory: up to 8 Mi characters, their tokens, and where no tokenizer is known what one learns from 256 KiB.
    """
    training_data = find_training_data(config, only_if_made)
    if training_data.shards is not None:
        return None
    task = training_data.task
    held_out = held_out_sources(config.data)
    # Of files elsewhere, each look costs a journey.
    here = [source for source in training_data.sources if isinstance(source.path, Path)]
    held_out_here = [source for source in held_out if isinstance(source.path, Path)]
    check_columns([*here, *held_out_here], training_data.columns)
    if task.is_windowed:
        return None
    first = peek(training_data.sources, training_data.columns, SAMPLED_ROWS, config.data.max_samples)
    rows = first.rows
    is_all = first.is_all
    folder: Path | None = None
    try:
        folder = tokenizer_folder(config, training_data, only_if_made)
        tokenizer = Tokenizer.load(folder)
        vocabulary = tokenizer.size
    except NotMade:
        kind = tokenizer_type_of(config, training_data)
        tokenizer = _stand_in(config, training_data, kind, first)
        depends_on_text = kind not in ("byte", "letters")
        if depends_on_text:
            rows = rows[1::2] or rows
            is_all = False
        vocabulary = 0 if depends_on_text else tokenizer.size
    examples = task.examples(config, training_data.columns, folder or Path(config.data.cache_dir))
    sources, *targets = task.token_lengths(tokenizer, examples, rows, config.model)
    if not len(sources):
        return None
    count = about_rows(training_data.sources)
    count = min(count, config.data.max_samples or count) * len(sources) // len(rows)
    is_here = held_out_here and len(held_out_here) == len(held_out)
    validated = about_rows(held_out_here) if is_here else 0
    return LengthEstimate(
        training_data.objective, sources, np.stack(targets), is_all, max(1, count), validated, vocabulary
    )


def _stand_in(config: Config, training_data: TrainingData, kind: str, first: Peek) -> Tokenizer:
    """A tokenizer that has learnt from every other one of the first rows."""
    examples = training_data.task.examples(config, training_data.columns, None)
    size = max(SMALLEST_VOCABULARY[kind], min(config.model.vocab_size, LARGEST_VOCABULARY))
    texts = chain.from_iterable(map(examples.texts, first.rows[::2]))
    try:
        return train_tokenizer(texts, kind, size, TAUGHT_BYTES, f"--train_file = {config.data.train_file}")
    except UserError as error:
        raise UserError(*map(first.bad_rows.explain, error.problems)) from None


def misfit(config: Config, tokenizer_dir: Path) -> str:
    """What speaks against a tokenizer for the training data, as one of another language loses its letters, or spells them
    out by bytes; empty where nothing does.

    Raises:
        UserError: the data or the tokenizer cannot be read.
    Memory: up to 8 Mi characters, and the library's word counts.
    """
    tokenizer = Tokenizer.load(tokenizer_dir)
    training_data = find_training_data(config)
    fingerprint = ""
    if training_data.shards is not None:
        fingerprint = Manifest.of(training_data.shards).content["tokenizer"]["fingerprint"]
    elif config.data.tokenizer_dir != AUTO:
        fingerprint = Tokenizer.load(config.data.tokenizer_dir).fingerprint
    if fingerprint == tokenizer.fingerprint:
        return ""
    if fingerprint:
        return say("its tokenizer differs from that of the data or --tokenizer_dir")
    examples = training_data.task.examples(config, training_data.columns, None)
    rows = peek(training_data.sources, training_data.columns, SAMPLED_ROWS, config.data.max_samples).rows
    taught = [text for row in rows[::2] for text in examples.texts(row)]
    if not any(taught):
        return ""
    measured = list(first_chars(chain.from_iterable(map(examples.texts, rows[1::2] or rows)), SAMPLE_CHARS))
    size = min(max(tokenizer.size, SMALLEST_VOCABULARY["bpe"]), LARGEST_VOCABULARY)
    own = quality(tokenizer, measured)
    trained = quality(train_tokenizer(taught, "bpe", size, 4 * SAMPLE_CHARS), measured)
    lost = own.unknown / max(own.tokens, 1)
    times = own.tokens / max(trained.tokens, 1)
    if lost > MOST_LOST:
        return say("its tokenizer has no tokens for {share} of this data, which would be lost", share=f"{lost:.1%}")
    if times > MOST_TIMES:
        words = "its tokenizer needs {times} times as many tokens as one trained on this data"
        return say(words, times=f"{times:.1f}")
    return ""
