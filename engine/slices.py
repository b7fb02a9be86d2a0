"""What does the walk carry through a block? One micro-batch, its rows laid end to end on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.collate import Batch
from model.loss import IGNORED
from model.rows import Rows


@dataclass(frozen=True)
class Slice:
    """The tensors of one micro-batch.

    Args:
        input_ids: (N,) int64 encoder tokens of all rows.
        decoder_ids, labels: (N',) int64, what the decoder reads and what it should write.
        source, target: the layout of both.
    """

    input_ids: Tensor
    decoder_ids: Tensor
    labels: Tensor
    source: Rows
    target: Rows

    @property
    def num_labels(self) -> int:
        """Labels that carry a loss."""
        return int((self.labels != IGNORED).sum())


def to_slice(batch: Batch, pad_token_id: int, device: torch.device) -> Slice:
    """Lay a padded batch end to end: only its real tokens reach the device."""
    keys = torch.from_numpy(np.ascontiguousarray(batch.keys)).to(device)
    source = Rows(tuple(int(n) for n in batch.input_lengths), keys)
    target = Rows(tuple(int(n) for n in batch.target_lengths), keys)
    labels = torch.from_numpy(batch.labels)
    decoder_ids = torch.full_like(labels, pad_token_id)
    decoder_ids[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad_token_id)
    flat = (source.flatten(torch.from_numpy(batch.input_ids)), target.flatten(decoder_ids), target.flatten(labels))
    input_ids, decoder_ids, labels = (t.to(device) for t in flat)
    return Slice(input_ids, decoder_ids, labels, source, target)
