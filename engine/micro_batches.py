"""What goes through a block at a time? One micro-batch, its rows laid end to end on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from config import T5ModelConfig
from data.batches.collate import Batch, PreferenceBatch
from devices.base import place
from limits import filled_tokens
from memory.estimate.shapes import Sizes
from model.loss import IGNORED
from model.rows import Rows


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one micro-batch.

    Args:
        input_ids: (N,) int64 encoder tokens of all rows.
        decoder_ids, labels: (N',) int64, what the decoder reads and what it should write.
        source, target: the layout of both.
        answers: target rows of one source row; the first answers of all rows come before the second ones.
        host_ids: encoder and decoder tokens where the program runs; None: where they are, or nobody needs them there.
        reference: (B answers,) log-probability of each answer under a reference model; None: not known or not needed.
    """

    input_ids: Tensor
    decoder_ids: Tensor
    labels: Tensor
    source: Rows
    target: Rows
    answers: int = 1
    reference: Tensor | None = None
    host_ids: tuple[Tensor, Tensor] | None = None

    @property
    def num_labels(self) -> int:
        """What the loss is averaged over: labels that carry one, or pairs of answers."""
        return int((self.labels != IGNORED).sum()) if self.answers == 1 else len(self.source.lengths)

    @cached_property
    def encoder_output_rows(self) -> Rows:
        """The layout of the encoder output as the decoder sees it: once for each answer, all fillers at the end."""
        if self.answers == 1:
            return self.source
        keys = None if self.source.keys is None else self.source.keys.repeat(self.answers)
        return Rows(self.source.lengths * self.answers, keys, self.source.filler * self.answers)

    def spread(self, output: Tensor) -> Tensor:
        """The encoder output (N, D) for each answer: (N answers, D)."""
        if self.answers == 1:
            return output
        rows, filler = output.split([self.source.row_tokens, self.source.filler])
        return torch.cat([*[rows] * self.answers, *[filler] * self.answers])

    def gather(self, grad: Tensor) -> Tensor:
        """The gradient of `spread`: (N answers, D) -> (N, D)."""
        if self.answers == 1:
            return grad
        rows, filler = grad.split([self.answers * n for n in (self.source.row_tokens, self.source.filler)])
        return torch.cat([part.view(self.answers, -1, part.shape[1]).sum(0) for part in (rows, filler)])


def to_micro_batch(
    batch: Batch, shape: T5ModelConfig, device: torch.device, sizes: Sizes | None = ((), ())
) -> MicroBatch:
    """Lay a padded batch end to end: only its real tokens reach the device.

    Args:
        shape: whose token ids of padding and start are used.
        sizes: what source and target are filled up to (`limits.filled_tokens`), with tokens that no row sees and no label
            judges, so that products meet few sizes; None: nothing is filled up.
    """
    keys = place(torch.from_numpy(np.ascontiguousarray(batch.keys)), device)
    answers = len(batch.target_lengths) // len(batch.input_lengths)
    lengths = [tuple(int(n) for n in side) for side in (batch.input_lengths, batch.target_lengths)]
    fillers = [0, 0]
    if sizes is not None:
        fillers = [filled_tokens(sum(side), those) - sum(side) for side, those in zip(lengths, sizes, strict=True)]
    source, target = Rows(lengths[0], keys, fillers[0]), Rows(lengths[1], keys.repeat(answers), fillers[1])
    labels = torch.from_numpy(batch.labels)
    decoder_ids = torch.full_like(labels, shape.start_token_id)
    decoder_ids[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, shape.pad_token_id)
    flat = [source.flatten(torch.from_numpy(batch.input_ids)), target.flatten(decoder_ids), target.flatten(labels)]
    values = (shape.pad_token_id, shape.pad_token_id, IGNORED)
    for ids, rows, value in zip(flat, (source, target, target), values, strict=True):
        ids[rows.row_tokens :] = value
    on_host = None if device.type == "cpu" else (flat[0], flat[1])
    input_ids, decoder_ids, labels = (place(t, device) for t in flat)
    known = batch.reference if isinstance(batch, PreferenceBatch) else None
    reference = None if known is None else torch.from_numpy(known)
    return MicroBatch(input_ids, decoder_ids, labels, source, target, answers, reference, on_host)
