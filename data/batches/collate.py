"""Rows of different lengths, pairs of answers to one prompt, and texts to be compared, as one rectangular batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from devices.sizes import LENGTH_MULTIPLE

IGNORED_LABEL = -100  # The loss skips these labels, as in Hugging Face models.
KEY_STEP = 0x9E3779B97F4A7C15  # The keys of the texts of a row lie so far apart: 2^64 divided by the golden ratio.


@dataclass(frozen=True, slots=True)
class Row:
    """One training example.

    Args:
        input_ids: (S,) token ids of the encoder, with end of text.
        labels: (T,) token ids of the decoder, with end of text.
        key: random key of this row; masks and dropout follow from it.
        references: further right answers, token ids as in labels.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    key: int
    references: Sequence[NDArray[np.int64]] = ()

    @property
    def lengths(self) -> tuple[int, int]:
        """Encoder and decoder tokens."""
        return len(self.input_ids), len(self.labels)


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """One prompt with two answers.

    Args:
        input_ids: (S,) token ids of the encoder; chosen, rejected: (T,) and (T',) of the decoder; all with end of text.
        key: random key of this row, for both answers.
        reference: log-probabilities of chosen and rejected under the reference model; None: not known.
    """

    input_ids: NDArray[np.int64]
    chosen: NDArray[np.int64]
    rejected: NDArray[np.int64]
    key: int
    reference: NDArray[np.float32] | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.input_ids), len(self.chosen) + len(self.rejected)


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """One text with its label, or those of its tokens.

    Args:
        input_ids: (S,) token ids of the encoder, with end of text.
        labels: (1,) or (S,) classes, -100 where masked, or float32, NaN where masked.
        key: random key of this row.
        decodes: whether a decoder reads the ids too.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64] | NDArray[np.float32]
    key: int
    decodes: bool = False

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.input_ids), len(self.input_ids) * self.decodes


@dataclass(frozen=True, slots=True)
class EmbeddingRow:
    """Texts that belong together or are more or less alike, or a text and the vector that it should have.

    Args:
        texts: (S,) token ids of each text, with end of text.
        targets: (1,) how alike two texts are, NaN where they belong together; or (W,), W above 1, the vector.
        key: random key of this row.
    """

    texts: Sequence[NDArray[np.int64]]
    targets: NDArray[np.float32]
    key: int

    @property
    def lengths(self) -> tuple[int, int]:
        return sum(map(len, self.texts)), 0


@dataclass(frozen=True)
class Batch:
    """What one forward sees, in numpy.

    Args:
        input_ids: (B, S) int64, padded with the pad id.
        input_lengths: (B,) int64, tokens before the padding.
        labels: (B, T) int64, padded with -100.
        target_lengths: (B,) int64, tokens before the padding.
        keys: (B,) int64, the row keys (their 64 bits read as signed).
        references: of each row; see `Row`. None: no row has any.
    """

    input_ids: NDArray[np.int64]
    input_lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    target_lengths: NDArray[np.int64]
    keys: NDArray[np.int64]
    references: Sequence[Sequence[NDArray[np.int64]]] | None = None
    # Whether labels are not text, and a decoder reads what the encoder reads:
    reads_inputs: ClassVar[bool] = False

    @property
    def num_rows(self) -> int:
        return len(self.input_ids)

    @property
    def num_tokens(self) -> int:
        """Encoder and decoder tokens without padding."""
        return int(self.input_lengths.sum() + self.target_lengths.sum())

    @property
    def num_labels(self) -> int:
        """What the loss is averaged over: labels that carry one."""
        return int((self.labels != IGNORED_LABEL).sum())

    @property
    def encoder_lengths(self) -> NDArray[np.int64]:
        """(B,) encoder tokens of each row, all its texts together."""
        return self.input_lengths

    @property
    def decoder_lengths(self) -> NDArray[np.int64]:
        """(B,) decoder tokens of each row, all its answers together."""
        return self.target_lengths


@dataclass(frozen=True)
class PreferenceBatch(Batch):
    """B prompts with two answers each.

    Args:
        labels, target_lengths: (2 B, T) and (2 B,): the chosen answers of all prompts, then the rejected ones.
        reference: (2 B,) float32 log-probabilities of the answers under the reference model, None: not known.
    """

    reference: NDArray[np.float32] | None = None

    @property
    def num_labels(self) -> int:
        """What the loss is averaged over: pairs of answers."""
        return self.num_rows

    @property
    def decoder_lengths(self) -> NDArray[np.int64]:
        both: NDArray[np.int64] = self.target_lengths.reshape(2, -1).sum(axis=0)
        return both


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """B texts with labels.

    Args:
        labels: (B, 1) of texts or (B, S) of tokens, int64 classes padded with -100, or float32 padded with NaN.
        target_lengths: (B,) tokens that a decoder reads, which are those of the encoder; 0 without one.
    """

    labels: NDArray[Any]
    reads_inputs: ClassVar[bool] = True

    @property
    def num_labels(self) -> int:
        is_masked = np.isnan(self.labels) if self.labels.dtype.kind == "f" else self.labels == IGNORED_LABEL
        return int((~is_masked).sum())


@dataclass(frozen=True)
class EmbeddingBatch(Batch):
    """R texts of B rows, those of a row side by side; `input_ids`, `input_lengths` and `keys` are of the texts.

    Args:
        labels: (R, 1) int64, a number for each text, the same for equal texts.
        target_lengths: (R,) zeros.
        row_texts: (B,) int64, how many texts each row has.
        targets: of each row; see `EmbeddingRow`.
    """

    row_texts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    targets: Sequence[NDArray[np.float32]] = ()
    reads_inputs: ClassVar[bool] = True

    @property
    def num_rows(self) -> int:
        return len(self.row_texts)

    @property
    def num_labels(self) -> int:
        """What the loss is averaged over: rows."""
        return self.num_rows

    @property
    def encoder_lengths(self) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = np.add.reduceat(self.input_lengths, np.cumsum(self.row_texts) - self.row_texts)
        return lengths

    @property
    def decoder_lengths(self) -> NDArray[np.int64]:
        return np.zeros(self.num_rows, np.int64)


AnyRow = Row | PreferenceRow | LabelledRow | EmbeddingRow


def flat_labels(batch: Batch) -> NDArray[Any]:
    """(R,) labels that are not text: one of each row, or of each of its tokens end to end."""
    if batch.labels.shape[1] == 1:
        return batch.labels.reshape(-1)
    return np.concatenate([row[:length] for row, length in zip(batch.labels, batch.input_lengths, strict=True)])


def collate(rows: Sequence[Row], pad_token_id: int) -> Batch:
    """Pad rows to the longest, rounded up to `LENGTH_MULTIPLE`, so that fewer shapes occur.

    Args:
        rows: one or more.
        pad_token_id: fills `input_ids`; labels are filled with -100.
    Memory:
        8 bytes x B x (S + T).
    """
    references = [row.references for row in rows]
    return Batch(
        **_inputs(rows, pad_token_id),
        **_targets([row.labels for row in rows]),
        references=references if any(references) else None,
    )


def collate_preferences(rows: Sequence[PreferenceRow], pad_token_id: int) -> PreferenceBatch:
    """Pad prompts and answers; see `collate`."""
    answers = [row.chosen for row in rows] + [row.rejected for row in rows]
    references = [row.reference for row in rows if row.reference is not None]
    return PreferenceBatch(
        **_inputs(rows, pad_token_id),
        **_targets(answers),
        references=None,
        reference=np.stack(references, axis=1).reshape(-1) if references else None,
    )


def collate_labels(rows: Sequence[LabelledRow], pad_token_id: int) -> LabelledBatch:
    """Pad texts and the labels of their tokens; see `collate`."""
    labels = [row.labels for row in rows]
    filler = np.nan if labels[0].dtype.kind == "f" else IGNORED_LABEL
    multiple = LENGTH_MULTIPLE if max(map(len, labels)) > 1 else 1
    return LabelledBatch(
        **_inputs(rows, pad_token_id),
        labels=_pad(labels, filler, multiple),
        target_lengths=np.array([row.lengths[1] for row in rows], np.int64),
        references=None,
    )


def collate_texts(rows: Sequence[EmbeddingRow], pad_token_id: int) -> EmbeddingBatch:
    """Pad the texts of rows; see `collate`."""
    texts = [text for row in rows for text in row.texts]
    # Each text has a key of its own, since a key fixes the dropout of one text.
    keys = [(row.key + number * KEY_STEP) % 2**64 for row in rows for number in range(len(row.texts))]
    return EmbeddingBatch(
        input_ids=_pad(texts, pad_token_id),
        input_lengths=_lengths(texts),
        labels=np.array([[_text_number(text)] for text in texts], np.int64),
        target_lengths=np.zeros(len(texts), np.int64),
        keys=np.array(keys, np.uint64).view(np.int64),
        references=None,
        row_texts=_lengths([row.texts for row in rows]),
        targets=[row.targets for row in rows],
    )


def _text_number(ids: NDArray[np.int64]) -> int:
    """63 bits that equal texts share."""
    digest = hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _inputs(rows: Sequence[Row | PreferenceRow | LabelledRow], pad_token_id: int) -> dict[str, NDArray[np.int64]]:
    """What a batch holds of its texts."""
    ids = [row.input_ids for row in rows]
    keys = np.array([row.key for row in rows], np.uint64).view(np.int64)
    return {"input_ids": _pad(ids, pad_token_id), "input_lengths": _lengths(ids), "keys": keys}


def _targets(labels: Sequence[NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    """What a batch holds of the texts of its decoder."""
    return {"labels": _pad(labels, IGNORED_LABEL), "target_lengths": _lengths(labels)}


def _lengths(sequences: Sequence[Sized]) -> NDArray[np.int64]:
    return np.array(list(map(len, sequences)), np.int64)


def _pad(sequences: Sequence[NDArray[Any]], filler: float, multiple: int = LENGTH_MULTIPLE) -> NDArray[Any]:
    """One line a sequence, as long as the longest, rounded up to a multiple."""
    longest = max(map(len, sequences))
    padded = np.full((len(sequences), -(-longest // multiple) * multiple), filler, sequences[0].dtype)
    for line, sequence in zip(padded, sequences, strict=True):
        line[: len(sequence)] = sequence
    return padded
