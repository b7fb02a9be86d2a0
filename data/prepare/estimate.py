"""What a look at the first rows says before they are prepared: how long they are, and whether a tokenizer suits them.

Where the tokenizer is not trained yet, one that learns from every other row stands in for it, and the rows between are
measured: it has seen less text, so it needs more tokens rather than fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.batches.rows import lengths_of
from data.prepare.data_tokenizer import explained, texts_of, tokenizer_folder, tokenizer_type_of
from data.prepare.training_data import find_training_data, held_out_sources
from data.shards.store import Manifest
from data.sources.lines import up_to
from data.sources.peek import about_rows, peek
from data.sources.reading import check_columns
from data.tokenizers.tokenizer import Tokenizer, quality
from data.tokenizers.training import SMALLEST_VOCABULARY, train_tokenizer
from settings.declared import CleaningConfig, DataConfig, T5ModelConfig, TokenizerConfig
from settings.fields import AUTO, counted
from support.language import say
from support.storage import NotMade, only_if_made

SAMPLED_ROWS = 2048
SAMPLE_CHARS = 256 * 1024  # A tokenizer is measured on so many letters.
TAUGHT_BYTES = 256 * 1024  # A stand-in learns from so many bytes.
LARGEST_VOCABULARY = 32768  # A sample has no more to teach.
TIMES_LONGER = 2  # Another row may be so many times as long as the longest one of the sample.
MOST_LOST = 1e-3  # A tokenizer with a larger share of unknown tokens does not suit the data.
MOST_TIMES = 3.0  # Nor does one that needs so many times the tokens of one that was trained on it.


@dataclass(frozen=True)
class LengthEstimate:
    """Tokens of the first rows before they are cut.

    Args:
        objective: what the rows teach. sources: (T, N) of the encoder, of each text of a row; 0: it has fewer.
        targets: (A, N) of the decoder, of each answer of a row.
        is_all: whether there are no other rows, and their tokenizer is known.
        about_rows: about as many rows there are, of conversations with every answer one for each. held_out_rows:
            likewise of files to validate with; 0: rows are held out, or such files are elsewhere.
        vocabulary: ids of the tokenizer; 0: they depend on rows that were not looked at.
    """

    objective: str
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    is_all: bool
    about_rows: int
    held_out_rows: int = 0
    vocabulary: int = 0

    def cut(self, data: DataConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(N,) tokens of encoder and decoder as the settings cut rows; both answers of a preference count."""
        limits = lengths_of(data, self.objective)
        sources = np.minimum(self.sources, data.max_seq_len)
        return sources.sum(0), np.minimum(self.targets, limits.target_tokens).sum(0)

    def longest(self, data: DataConfig) -> tuple[int, int]:
        """What the longest of all rows is taken to have: more than the sample, as far as the settings allow it."""
        limits = lengths_of(data, self.objective)
        times = 1 if self.is_all else TIMES_LONGER
        sources = np.minimum(times * self.sources.max(1), data.max_seq_len)
        targets = np.minimum(times * self.targets.max(1), limits.target_tokens)
        return int(sources.sum()), int(targets.sum())

    @property
    def num_rows(self) -> int:
        """The rows that were looked at."""
        return int(self.sources.shape[1])

    @property
    def texts(self) -> float:
        """The texts of a row, on average."""
        return float((self.sources > 0).sum(0).mean())

    def describe(self) -> str:
        """Which rows were looked at, for people."""
        rows = counted(self.num_rows, "row")
        return say("all {rows}", rows=rows) if self.is_all else say("the first {rows} of the data", rows=rows)


def estimate_lengths(
    data: DataConfig, is_finetune: bool, model: T5ModelConfig, tokenizer: TokenizerConfig, cleaning: CleaningConfig
) -> LengthEstimate | None:
    """Encode the first of the rows that the settings name; None where rows are cut out of a stream, or are shards.

    Raises:
        UserError: the data cannot be read, or lack a column. NotMade: the built-in sample is not there.
    Memory: up to 8 Mi characters, their tokens, and where no tokenizer is known what one learns from 256 KiB.
    """
    training_data = find_training_data(data, is_finetune, only_if_made)
    if training_data.shards is not None:
        return None
    task = training_data.task
    held_out = held_out_sources(data)
    # Of files elsewhere, each look costs a journey.
    held_out_here = [source for source in held_out if isinstance(source.path, Path)]
    train_here = [source for source in training_data.sources if isinstance(source.path, Path)]
    check_columns([*train_here, *held_out_here], training_data.columns)
    if task.is_windowed:
        return None
    first = peek(training_data.sources, training_data.columns, SAMPLED_ROWS, data.max_samples)
    rows = first.rows
    is_all = first.is_all
    folder = Path(data.cache_dir)
    depends_on_text = False
    try:
        folder = tokenizer_folder(data, tokenizer.tokenizer_type, model.vocab_size, training_data, only_if_made)
        encoder = Tokenizer.load(folder)
    except NotMade:
        kind = tokenizer_type_of(data, tokenizer.tokenizer_type, training_data)
        depends_on_text = kind not in ("byte", "letters")
        size = max(SMALLEST_VOCABULARY[kind], min(model.vocab_size, LARGEST_VOCABULARY))
        taught = texts_of(data, training_data, rows[::2])
        with explained(first.bad_rows):
            encoder = train_tokenizer(taught, kind, size, TAUGHT_BYTES, f"--train_file = {data.train_file}")
    if depends_on_text:
        rows = rows[1::2] or rows
        is_all = False
    examples = task.examples(data, cleaning.clean, training_data.columns, folder)
    sources, *targets = task.token_lengths(encoder, examples, rows, model)
    num_rows = sources.shape[-1]
    if not num_rows:
        return None
    return LengthEstimate(
        training_data.objective,
        np.atleast_2d(sources),
        np.stack(targets),
        is_all,
        max(1, first.about_rows() * num_rows // len(rows)),
        about_rows(held_out) if held_out and held_out == held_out_here else 0,
        0 if depends_on_text else encoder.size,
    )


def misfit(data: DataConfig, is_finetune: bool, tokenizer_dir: Path) -> str:
    """What speaks against a tokenizer for the training data, as one of another language loses its letters, or spells
    them out by bytes; empty where nothing does.

    Raises:
        UserError: the data or the tokenizer cannot be read.
    Memory: up to 8 Mi characters, and the library's word counts.
    """
    tokenizer = Tokenizer.load(tokenizer_dir)
    training_data = find_training_data(data, is_finetune)
    fingerprint: object = None
    if training_data.shards is not None:
        fingerprint = Manifest.of(training_data.shards).content["tokenizer"]["fingerprint"]
    elif data.tokenizer_dir != AUTO:
        fingerprint = Tokenizer.load(data.tokenizer_dir).fingerprint
    if fingerprint == tokenizer.fingerprint:
        return ""
    if fingerprint is not None:
        return say("its tokenizer differs from that of the data or --tokenizer_dir")
    rows = peek(training_data.sources, training_data.columns, SAMPLED_ROWS, data.max_samples).rows
    taught = list(texts_of(data, training_data, rows[::2]))
    if not any(taught):
        return ""
    measured = list(up_to(texts_of(data, training_data, rows[1::2] or rows), SAMPLE_CHARS, len))
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
