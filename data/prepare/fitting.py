"""Does a tokenizer suit the data? What it loses of them, and how many tokens it needs beside one trained on them.

The texts of even rows train a tokenizer of as many tokens, those of odd rows are measured with both: a tokenizer of one
language loses the letters of another, or spells them out byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from childproc import call
from config import Config
from data.prepare.task import decide, examples_of, first_chars
from data.shards.store import Manifest
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from data.tokenizers.tokenizer import Tokenizer, quality
from data.tokenizers.training import SMALLEST_VOCABULARY, train_tokenizer
from language import say
from settings.fields import AUTO

SAMPLE_CHARS = 256 * 1024
MOST_LOST = 1e-3  # of the tokens may stand for what the vocabulary cannot spell
MOST_TIMES = 3.0  # as many tokens as a tokenizer trained on the data needs
LARGEST_VOCABULARY = 32768  # of the one trained: a sample has no more to teach


@dataclass(frozen=True)
class Fit:
    """How a tokenizer suits the data.

    Args:
        lost: share of its tokens that stand for unknown letters. times: its tokens over those of one trained on the data.
        is_other: the data or the settings have another tokenizer already.
    """

    lost: float = 0.0
    times: float = 1.0
    is_other: bool = False

    def problem(self) -> str:
        """What speaks against it; empty where nothing does."""
        if self.is_other:
            return say("its tokenizer is another than the one that the data or --tokenizer_dir have")
        if self.lost > MOST_LOST:
            share = f"{self.lost:.1%}"
            return say("its tokenizer cannot spell {share} of this data's tokens, which would be lost", share=share)
        if self.times > MOST_TIMES:
            times = f"{self.times:.1f}"
            return say("its tokenizer needs {times} times the tokens of one trained on this data", times=times)
        return ""


def fit_in_child(config: Config, tokenizer_dir: Path) -> Fit:
    """Measure in a process of its own, whose memory goes with it.

    Raises:
        UserError: the data cannot be read.
    """
    return call(measure_fit, config, tokenizer_dir)


def measure_fit(config: Config, tokenizer_dir: Path) -> Fit:
    """Measure how a tokenizer suits the training data.

    Raises:
        UserError: the data or the tokenizer cannot be read.
    Memory: a few MB for the sample, and the library's word counts.
    """
    tokenizer = Tokenizer.load(tokenizer_dir)
    task = decide(config)
    if task.shards is not None:
        return Fit(is_other=Manifest.of(task.shards).content["tokenizer"]["fingerprint"] != tokenizer.fingerprint)
    if config.data.tokenizer_dir != AUTO:
        return Fit(is_other=Tokenizer.load(config.data.tokenizer_dir).fingerprint != tokenizer.fingerprint)
    made = examples_of(config, task.kind, task.columns, None)
    rows = chain.from_iterable(read_rows(task.sources, task.columns, BadRows(skip=True)))
    sample, left = [], SAMPLE_CHARS
    for row in islice(rows, config.data.max_samples):
        sample.append(list(first_chars(made.texts(row), left)))
        left -= sum(map(len, sample[-1]))
        if left <= 0:
            break
    taught = [text for texts in sample[::2] for text in texts]
    asked = [text for texts in sample[1::2] for text in texts] or taught
    if not any(taught):
        return Fit()
    found = quality(tokenizer, asked)
    size = min(max(tokenizer.size, SMALLEST_VOCABULARY["bpe"]), LARGEST_VOCABULARY)
    own = quality(train_tokenizer(taught, "bpe", size, 4 * SAMPLE_CHARS), asked)
    return Fit(found.unknown / max(found.tokens, 1), found.tokens / max(own.tokens, 1))
