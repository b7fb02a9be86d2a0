"""One micro-batch: its rows laid end to end on the device, as they go through a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from model.loss import IGNORED
from model.rows import Rows


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one micro-batch.

    Args:
        input_ids: (N,) int64 encoder tokens of all rows.
        decoder_ids, labels: (N',) int64, what the decoder reads and what it should write. With a head over labels, those of rows
            (B,) or of tokens without fillers: classes, or numbers with nan where there is none.
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
        if self.answers > 1:
            return len(self.source.lengths)
        return int((~self.labels.isnan() if self.labels.is_floating_point() else self.labels != IGNORED).sum())

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
