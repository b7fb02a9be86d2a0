"""How do rows of different length become one rectangular batch?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100  # the loss skips these places, as in Hugging Face models


@dataclass(frozen=True)
class Row:
    """One training example.

    Args:
        input_ids: (S,) token ids of the encoder, with end of text.
        labels: (T,) token ids of the decoder, with end of text.
        key: random key of this row; masks and dropout follow from it.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    key: int

    @property
    def lengths(self) -> tuple[int, int]:
        """Encoder and decoder tokens."""
        return len(self.input_ids), len(self.labels)


@dataclass(frozen=True)
class Batch:
    """What one forward sees, in numpy.

    Args:
        input_ids: (B, S) int64, padded with the pad id.
        input_lengths: (B,) int64, tokens before the padding.
        labels: (B, T) int64, padded with -100.
        target_lengths: (B,) int64, tokens before the padding.
        keys: (B,) int64, the row keys (their 64 bits read as signed).
    """

    input_ids: NDArray[np.int64]
    input_lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    target_lengths: NDArray[np.int64]
    keys: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return len(self.input_ids)

    @property
    def num_tokens(self) -> int:
        """Encoder and decoder tokens without padding."""
        return int(self.input_lengths.sum() + self.target_lengths.sum())


def collate(rows: Sequence[Row], pad_token_id: int, length_multiple: int = 8) -> Batch:
    """Pad rows to the longest, rounded up.

    Args:
        rows: one or more.
        pad_token_id: fills `input_ids`; labels are filled with -100.
        length_multiple: S and T are multiples of this, so that fewer shapes occur.
    Memory:
        8 bytes x B x (S + T).
    """
    return Batch(
        input_ids=_pad([row.input_ids for row in rows], pad_token_id, length_multiple),
        input_lengths=np.array([len(row.input_ids) for row in rows], np.int64),
        labels=_pad([row.labels for row in rows], IGNORED_LABEL, length_multiple),
        target_lengths=np.array([len(row.labels) for row in rows], np.int64),
        keys=np.array([row.key for row in rows], np.uint64).view(np.int64),
    )


def _pad(sequences: Sequence[NDArray[np.int64]], filler: int, multiple: int) -> NDArray[np.int64]:
    longest = max(len(sequence) for sequence in sequences)
    padded = np.full((len(sequences), -(-longest // multiple) * multiple), filler, np.int64)
    for line, sequence in zip(padded, sequences, strict=True):
        line[: len(sequence)] = sequence
    return padded
