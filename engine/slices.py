"""What does the walk carry through a block? One micro-batch, its rows laid end to end on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.collate import Batch, PreferenceBatch
from devices.base import place
from model.loss import IGNORED
from model.rows import Rows


@dataclass(frozen=True)
class Slice:
    """The tensors of one micro-batch.

    Args:
        input_ids: (N,) int64 encoder tokens of all rows.
        decoder_ids, labels: (N',) int64, what the decoder reads and what it should write.
        source, target: the layout of both.
        answers: target rows of one source row; the first answers of all rows come before the second ones.
        reference: (B answers,) log-probability of each answer under a reference model; None: not known or not needed.
    """

    input_ids: Tensor
    decoder_ids: Tensor
    labels: Tensor
    source: Rows
    target: Rows
    answers: int = 1
    reference: Tensor | None = None

    @property
    def num_labels(self) -> int:
        """What the loss is averaged over: labels that carry one, or pairs of answers."""
        return int((self.labels != IGNORED).sum()) if self.answers == 1 else len(self.source.lengths)

    @property
    def memory(self) -> Rows:
        """The layout of the encoder's output as the decoder sees it: once for each answer."""
        if self.answers == 1:
            return self.source
        keys = self.source.keys  # adapters may drop what they read of it: the same for both answers
        return Rows(self.source.lengths * self.answers, None if keys is None else keys.repeat(self.answers))

    def spread(self, memory: Tensor) -> Tensor:
        """The encoder's output (N, D) for each answer: (N answers, D)."""
        return memory if self.answers == 1 else memory.repeat(self.answers, 1)

    def gather(self, grad: Tensor) -> Tensor:
        """The gradient of `spread`: (N answers, D) -> (N, D)."""
        return grad if self.answers == 1 else grad.view(self.answers, -1, grad.shape[1]).sum(0)


def to_slice(batch: Batch, pad_token_id: int, device: torch.device, token_multiple: int = 1) -> Slice:
    """Lay a padded batch end to end: only its real tokens reach the device.

    Args:
        token_multiple: `Device.token_multiple`: a last row of padding, which no other row sees and no label judges, fills
            both sides up to a multiple of it, so that a backend that keeps memory for each shape meets few of them.
    """
    keys = torch.from_numpy(np.ascontiguousarray(batch.keys))
    answers = len(batch.target_lengths) // len(batch.input_lengths)
    lengths = [tuple(int(n) for n in side) for side in (batch.input_lengths, batch.target_lengths)]
    source, target = (Rows(side) for side in lengths)
    labels = torch.from_numpy(batch.labels)
    decoder_ids = torch.full_like(labels, pad_token_id)
    decoder_ids[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad_token_id)
    flat = [source.flatten(torch.from_numpy(batch.input_ids)), target.flatten(decoder_ids), target.flatten(labels)]
    filler = _filler_lengths(source.num_tokens, target.num_tokens, token_multiple) if answers == 1 else None
    if filler is not None:
        lengths = [(*side, length) for side, length in zip(lengths, filler, strict=True)]
        keys = torch.cat([keys, keys.new_zeros(1)])
        ends = ((filler[0], pad_token_id), (filler[1], pad_token_id), (filler[1], IGNORED))
        flat = [torch.cat([ids, ids.new_full((n,), value)]) for ids, (n, value) in zip(flat, ends, strict=True)]
    input_ids, decoder_ids, labels, keys = (place(t, device) for t in (*flat, keys))
    known = batch.reference if isinstance(batch, PreferenceBatch) else None
    reference = None if known is None else torch.from_numpy(known)
    source, target = Rows(lengths[0], keys), Rows(lengths[1], keys.repeat(answers))
    return Slice(input_ids, decoder_ids, labels, source, target, answers, reference)


def _filler_lengths(source_tokens: int, target_tokens: int, multiple: int) -> tuple[int, int] | None:
    """Tokens of the row of padding on each side; None where none is needed. A row has at least one token."""
    missing = -source_tokens % multiple, -target_tokens % multiple
    return (missing[0] or multiple, missing[1] or multiple) if any(missing) else None
