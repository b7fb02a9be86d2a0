"""A batch of rows as one micro-batch on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from data.batches.collate import Batch, PreferenceBatch, flat_labels
from devices.base import has_fused, place
from limits import filled_tokens
from memory.estimate.shapes import Sizes
from model.attention import attends_compiled
from model.loss import IGNORED
from model.micro_batch import MicroBatch, label_rows
from model.rows import Rows, dense_sides
from settings.declared import T5ModelConfig


def to_micro_batch(
    batch: Batch, shape: T5ModelConfig, device: torch.device, sizes: Sizes | None = ((), ())
) -> MicroBatch:
    """Lay a padded batch out as the device attends to it: end to end for compiled kernels, elsewhere in groups of like length.

    Args:
        shape: whose token ids of padding and start are used.
        sizes: what source and target are filled up to where rows lie end to end (`limits.filled_tokens`), with tokens that no
            row sees and no label judges, so that products meet few sizes; None: nothing is filled up.
    """
    keys = torch.from_numpy(np.ascontiguousarray(batch.keys))
    answers = len(batch.target_lengths) // len(batch.input_lengths)
    sources = tuple(int(length) for length in batch.input_lengths)
    targets = sources if batch.reads_inputs else tuple(int(length) for length in batch.target_lengths)
    if attends_compiled(shape.d_kv, device):
        source = _end_to_end(sources, keys, None if sizes is None else sizes[0])
        target = _end_to_end(targets, keys.repeat(answers), None if sizes is None else sizes[1])
    else:
        source, target = dense_sides(sources, targets, keys, few_shapes=not has_fused(device))
    ids = torch.from_numpy(batch.input_ids)
    if batch.reads_inputs:
        target = source
        written = ids
        labels = torch.from_numpy(flat_labels(batch))
    else:
        written = torch.from_numpy(batch.labels)
        labels = label_rows(target).flatten(written, IGNORED)
    # A decoder reads what it writes, behind the start token.
    decoder_ids = torch.full_like(written, shape.start_token_id)
    decoder_ids[:, 1:] = written[:, :-1].masked_fill(written[:, :-1] == IGNORED, shape.pad_token_id)
    flat = source.flatten(ids, shape.pad_token_id), target.flatten(decoder_ids, shape.pad_token_id)
    input_ids, decoder_ids, labels = (place(tensor, device) for tensor in (*flat, labels))
    known = batch.reference if isinstance(batch, PreferenceBatch) else None
    reference = None if known is None else torch.from_numpy(known)
    on_host = None if device.type == "cpu" else flat
    if source.groups:  # What attention and loss need to know of where rows lie goes to the device with the ids.
        source.is_padding(device)
        target.token_index(device, label_rows(target).num_tokens)
    return MicroBatch(input_ids, decoder_ids, labels, source, target, answers, reference, on_host)


def _end_to_end(lengths: tuple[int, ...], keys: Tensor, sizes: tuple[int, ...] | None) -> Rows:
    tokens = sum(lengths)
    return Rows(lengths, keys, 0 if sizes is None else filled_tokens(tokens, sizes) - tokens)
