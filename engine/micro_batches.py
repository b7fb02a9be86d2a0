"""A batch of rows as one micro-batch on the device."""

from __future__ import annotations

import numpy as np
import torch

from data.batches.collate import Batch, PreferenceBatch
from devices.base import place
from limits import filled_tokens
from memory.estimate.shapes import Sizes
from model.loss import IGNORED
from model.micro_batch import MicroBatch
from model.rows import Rows
from settings.consistency import SEQUENCE
from settings.declared import T5ModelConfig


def to_micro_batch(
    batch: Batch, shape: T5ModelConfig, device: torch.device, sizes: Sizes | None = ((), ())
) -> MicroBatch:
    """Lay a padded batch end to end: only its real tokens reach the device.

    Args:
        shape: whose token ids of padding and start are used.
        sizes: what source and target are filled up to (`limits.filled_tokens`), with tokens that no row sees and no label
            judges, so that products meet few sizes; None: nothing is filled up.
    """
    keys = torch.from_numpy(np.ascontiguousarray(batch.keys))
    of_rows = place(keys, device)
    answers = len(batch.target_lengths) // len(batch.input_lengths)
    lengths = [tuple(int(n) for n in side) for side in (batch.input_lengths, batch.target_lengths)]
    fillers = [0, 0]
    if sizes is not None:
        fillers = [filled_tokens(sum(side), those) - sum(side) for side, those in zip(lengths, sizes, strict=True)]
    source = target = Rows(lengths[0], of_rows, fillers[0])
    ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
    if shape.is_text:
        target = Rows(lengths[1], of_rows if answers == 1 else place(keys.repeat(answers), device), fillers[1])
        decoder_ids = torch.full_like(labels, shape.start_token_id)
        decoder_ids[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, shape.pad_token_id)
        labels = target.flatten(labels)
        labels[target.row_tokens :] = IGNORED
    else:  # labels of rows or tokens; a decoder, if there is one, reads what the encoder reads, shifted by the start token
        decoder_ids = ids.roll(1, 1)
        decoder_ids[:, 0] = shape.start_token_id
        labels = labels if labels.is_floating_point() else labels.long()
        labels = labels.reshape(-1) if shape.head == SEQUENCE else source.flatten(labels)[: source.row_tokens]
    flat = source.flatten(ids), target.flatten(decoder_ids)
    for each, rows in zip(flat, (source, target), strict=True):
        each[rows.row_tokens :] = shape.pad_token_id
    input_ids, decoder_ids, labels = (place(t, device) for t in (*flat, labels))
    known = batch.reference if isinstance(batch, PreferenceBatch) else None
    reference = None if known is None else torch.from_numpy(known)
    on_host = None if device.type == "cpu" else flat
    return MicroBatch(input_ids, decoder_ids, labels, source, target, answers, reference, on_host)
