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

from data.batches.objectives import lengths_of
from data.prepare.encode import Encoder, TextEncoder
from data.prepare.task import (
    decide,
    examples_of,
    first_chars,
    held_out_sources,
    tokenizer_folder,
    tokenizer_type_of,
)
from data.shards.store import COLUMNS, STREAM, Manifest
from data.sources.peek import about_rows, peek
from data.sources.reading import check_columns
from data.tokenizers.tokenizer import Tokenizer, quality
from data.tokenizers.training import SMALLEST_VOCABULARY, train_tokenizer
from language import say
from settings.consistency import HEADS
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
    task = decide(config, only_if_made)
    if task.shards is not None:
        return None
    held_out = held_out_sources(config.data)
    # elsewhere each costs a journey
    here, held_out_here = (
        [source for source in sources if isinstance(source.path, Path)] for sources in (task.sources, held_out)
    )
    check_columns([*here, *held_out_here], task.columns)
    if task.kind == STREAM:
        return None
    found = peek(task.sources, task.columns, SAMPLED_ROWS, config.data.max_samples)
    rows, is_all, kind = found.rows, found.is_all, tokenizer_type_of(config, task)
    try:
        folder = tokenizer_folder(config, task, only_if_made)
        tokenizer = Tokenizer.load(folder)
        vocabulary = tokenizer.size
    except NotMade:
        folder, examples = Path(config.data.cache_dir), examples_of(config, task.kind, task.columns, None)
        size = max(SMALLEST_VOCABULARY[kind], min(config.model.vocab_size, LARGEST_VOCABULARY))
        taught = chain.from_iterable(map(examples.texts, rows[::2]))
        named = f"--train_file = {config.data.train_file}"
        try:
            tokenizer = train_tokenizer(taught, kind, size, TAUGHT_BYTES, named)
        except UserError as error:
            raise UserError(*map(found.bad_rows.explain, error.problems)) from None
        if kind not in ("byte", "letters"):  # whose lengths do not depend on what they learn from
            rows, is_all = rows[1::2] or rows, False
        vocabulary = tokenizer.size if kind in ("byte", "letters") else 0
    if task.kind in HEADS:
        texts = TextEncoder(tokenizer, config.data.prepare_text).encode([text for text, _ in rows])
        sources = np.array([len(ids) + 1 for ids in texts], np.int64)
        targets = [sources * (config.model.num_decoder_layers > 0)]
    else:
        whole = (None,) * len(COLUMNS[task.kind])
        encoded = Encoder(tokenizer, examples_of(config, task.kind, task.columns, folder), whole)(rows)
        sources, *targets = encoded.uncut
    if not len(sources):
        return None
    count = about_rows(task.sources)
    count = min(count, config.data.max_samples or count) * len(sources) // len(rows)
    is_here = held_out_here and len(held_out_here) == len(held_out)
    validated = about_rows(held_out_here) if is_here else 0
    return LengthEstimate(task.objective, sources, np.stack(targets), is_all, max(1, count), validated, vocabulary)


def misfit(config: Config, tokenizer_dir: Path) -> str:
    """What speaks against a tokenizer for the training data, as one of another language loses its letters, or spells them
    out by bytes; empty where nothing does.

    Raises:
        UserError: the data or the tokenizer cannot be read.
    Memory: up to 8 Mi characters, and the library's word counts.
    """
    tokenizer, task = Tokenizer.load(tokenizer_dir), decide(config)
    own = None if task.shards is None else Manifest.of(task.shards).content["tokenizer"]["fingerprint"]
    if own is None and config.data.tokenizer_dir != AUTO:
        own = Tokenizer.load(config.data.tokenizer_dir).fingerprint
    if own is not None:
        told = "its tokenizer differs from that of the data or --tokenizer_dir"
        return "" if own == tokenizer.fingerprint else say(told)
    examples = examples_of(config, task.kind, task.columns, None)
    rows = peek(task.sources, task.columns, SAMPLED_ROWS, config.data.max_samples).rows
    taught = [text for row in rows[::2] for text in examples.texts(row)]
    if not any(taught):
        return ""
    others = chain.from_iterable(map(examples.texts, rows[1::2] or rows))
    asked = list(first_chars(others, SAMPLE_CHARS))
    found = quality(tokenizer, asked)
    size = min(max(tokenizer.size, SMALLEST_VOCABULARY["bpe"]), LARGEST_VOCABULARY)
    trained = quality(train_tokenizer(taught, "bpe", size, 4 * SAMPLE_CHARS), asked)
    lost, times = found.unknown / max(found.tokens, 1), found.tokens / max(trained.tokens, 1)
    if lost > MOST_LOST:
        share = f"{lost:.1%}"
        return say("its tokenizer has no tokens for {share} of this data, which would be lost", share=share)
    if times > MOST_TIMES:
        told = "its tokenizer needs {times} times as many tokens as one trained on this data"
        return say(told, times=f"{times:.1f}")
    return ""
