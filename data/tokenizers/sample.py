"""An even sample of the rows for training a tokenizer, and counts of its words, in bounded memory.

Rows: each draws a random key, and the rows with the lowest keys that fit a bound are kept, in their order, so every row
has the same chance whatever the size of the corpus (sampling by priority, Efraimidis & Spirakis 2006). They wait in a
file. Words: trainers hold a hundred bytes and more for each byte of *different* words. Text without spaces is all
different words: 64 MiB of Chinese verse took 4.8 GiB. So the table of words has a fixed size. When it is full, rare
words leave it (lossy counting, Manku & Motwani 2002); where a rare word is long, or of a script without spaces, its
halves take its place, so that what occurs often inside rare words still counts.
"""

from __future__ import annotations

import itertools
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.batches.order import row_keys

LONGEST_SAMPLE_CHARS = 64 * 1024  # One huge row should not be the sample.
IN_MEMORY_BYTES = 8 * 2**20  # A larger sample goes to the disk.
HEAD = struct.Struct("<QI")  # The key of a waiting row, and its number of bytes.
KEYS = 2**64
BINS = 4096
LONG_WORD = 16  # Longer words may be halved.
PAIR = 2  # Words of scripts without spaces may be halved where they are longer than a pair.
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
ROUNDS = 3  # A word of sixteen letters is halved that often before more frequent ones are.
# Scripts without spaces begin here; Hangul above it has spaces, and halving it costs little.
_FIRST_UNSPACED = "\u0e00"
Words = list[tuple[str, int]]


@dataclass(frozen=True)
class TrainingLimits:
    """What training a tokenizer may hold.

    Args:
        words: most different words while they are counted, about 170 bytes each. bpe_bytes: most UTF-8 of different
            words that BPE learns from, about 120 bytes each. unigram_letters: likewise of Unigram, about 600 bytes
                each.
    """

    words: int
    bpe_bytes: int
    unigram_letters: int


SMALL = TrainingLimits(200_000, 600_000, 300_000)  # It takes about 130 MiB.
LARGE = TrainingLimits(1_000_000, 5_000_000, 1_200_000)  # It takes about 800 MiB.


def sample_texts(texts: Iterable[str], sample_bytes: int, folder: str | Path | None = None) -> Iterator[str]:
    """Read all texts, and give an even sample of them within a byte bound, in their order.

    Args:
        sample_bytes: of UTF-8, above 0. folder: where up to twice as much waits; None: where temporary files lie.
    Memory:
        8 MiB, whatever the number of rows.
    """
    spool = _Spool(folder)
    try:
        for key, text in zip(_keys(), texts, strict=False):  # There are always more keys.
            spool.add(key, text[:LONGEST_SAMPLE_CHARS].encode())
            if spool.bytes > 2 * sample_bytes:
                spool = spool.cut(sample_bytes)
        if spool.bytes > sample_bytes:
            spool = spool.cut(sample_bytes)
        for _, data in spool.rows():
            yield data.decode()
    finally:
        spool.close()


def _keys() -> Iterator[int]:
    for first in itertools.count(0, 1024):
        yield from row_keys(0, np.arange(first, first + 1024)).tolist()


class _Spool:
    """Rows that wait in a file, all with keys below `top`."""

    def __init__(self, folder: str | Path | None, top: int = KEYS) -> None:
        self.folder = folder
        self.top = top
        self.bytes = 0
        # `close` closes it.
        where = None if folder is None else str(folder)
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES, dir=where)  # noqa: SIM115

    def add(self, key: int, data: bytes) -> None:
        """Keep a row, unless its key is too high."""
        if key < self.top:
            self._file.write(HEAD.pack(key, len(data)) + data)
            self.bytes += len(data)

    def rows(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        while head := self._file.read(HEAD.size):
            key, size = HEAD.unpack(head)
            yield key, self._file.read(size)

    def cut(self, most_bytes: int) -> _Spool:
        """Another with the rows of lowest keys that fit, one at least; this one is closed."""
        sizes = np.zeros(BINS, np.int64)
        lowest = self.top
        for key, data in self.rows():
            sizes[key * BINS // self.top] += len(data)
            lowest = min(lowest, key)
        whole = int(np.searchsorted(np.cumsum(sizes), most_bytes, side="right"))
        fresh = _Spool(self.folder, max(self.top * whole // BINS, lowest + 1))
        for key, data in self.rows():
            fresh.add(key, data)
        self.close()
        return fresh

    def close(self) -> None:
        self._file.close()


def count_words(texts: Iterable[str], split: Callable[[str], Iterable[str]], most_words: int) -> Counter[str]:
    """Count the words of all texts.

    Args:
        split: gives the words of a text. most_words: different ones that are held; rarer ones leave, see above.
    Memory:
        about 170 bytes x most_words.
    """
    counts = Counter[str]()
    for text in texts:
        counts.update(split(text))
        floor = 1
        most = most_words
        while len(counts) > most:
            for _ in range(ROUNDS):
                counts = _without_rare(counts, floor)
            floor += 1
            most = most_words // 2
    return counts


def _without_rare(counts: Counter[str], floor: int) -> Counter[str]:
    """Without words that occurred `floor` times or less; halves of the long ones stand in for them."""
    frequent = Counter[str]()
    for word, count in counts.items():
        for part in (word,) if count > floor else _halves(word):
            frequent[part] = frequent.get(part, 0) + count  # Looking up what a Counter lacks is slow.
    return frequent


def _halves(word: str) -> tuple[str, ...]:
    """What may stand in for a rare word; nothing where it is short."""
    longest_whole = PAIR if word[-1] >= _FIRST_UNSPACED else LONG_WORD
    return (word[: len(word) // 2], word[len(word) // 2 :]) if len(word) > longest_whole else ()


def most_frequent(counts: Counter[str], most: int, size: Callable[[str], int]) -> Words:
    """The words to learn from, most frequent first, within a bound on what they measure together.

    Args:
        counts: used up. most: of what `size` gives for all of them.
    """
    total = sum(map(size, counts))
    rounds = 0
    while total > most:
        floor = 1 + rounds // ROUNDS
        rounds += 1
        rare = [word for word, count in counts.items() if count <= floor]
        for word in sorted(rare, key=lambda word: (-len(word), word)):
            if total <= most:
                break
            count = counts.pop(word)
            total -= size(word)
            for half in _halves(word):
                if half not in counts:
                    total += size(half)
                counts[half] += count
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
