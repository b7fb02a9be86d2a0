"""One micro-batch: its rows as they lie on the device and go through a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.loss import count_labels
from model.row_groups import padded_size
from model.rows import Rows


class Side(NamedTuple):
    """What encoder or decoder reads: ids (N,) on the device, and on the host where they were kept there; their
    layout.
    """

    ids: Tensor
    rows: Rows
    host_ids: Tensor | None


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one micro-batch.

    Args:
        input_ids: (N,) int64 encoder tokens of all rows.
        decoder_ids: (N',) int64, what the decoder reads.
        labels: int64, what it should write, of the tokens of `label_rows`. With a head over labels, those of rows (B,)
            or of tokens without padding: classes, or numbers with nan where there is none.
        source, target: the layout of both; of dense rows, a group of target rows has the answers of a group of source
            rows.
        answers: target rows of one source row; the first answers of all rows come before the second ones. Dense rows
            lie with the answers of one source row side by side.
        host_ids: encoder and decoder tokens where the program runs; None: where they are, or nobody needs them there.
        batch: the rows as they were read, for an objective that needs more of them than labels.
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
    batch: Any = None

    @property
    def num_labels(self) -> int:
        """What the loss is averaged over: labels that carry one, or pairs of answers."""
        if self.answers > 1:
            return len(self.source.lengths)
        return int(count_labels(self.labels))

    def side(self, is_decoder: bool) -> Side:
        """What the encoder reads, or the decoder."""
        source_ids, target_ids = self.host_ids or (None, None)
        if is_decoder:
            return Side(self.decoder_ids, self.target, target_ids)
        return Side(self.input_ids, self.source, source_ids)

    @cached_property
    def label_rows(self) -> Rows:
        """The layout of the tokens that have labels: the target rows without padding."""
        return label_rows(self.target)

    def hidden_at_labels(self, hidden: Tensor) -> Tensor:
        """The hidden states at the labels, in the layout `label_rows`; filler tokens at the end get arbitrary ones."""
        if not self.target.groups:
            return hidden
        return hidden.index_select(0, self.target.token_index(hidden.device, self.label_rows.num_tokens))

    def gradient_at_tokens(self, grad: Tensor) -> Tensor:
        """The backward of `hidden_at_labels`: the gradient of all tokens (N', D), zero at those without a label."""
        if not self.target.groups:
            return grad
        tokens = self.target.row_tokens
        index = self.target.token_index(grad.device, self.label_rows.num_tokens)
        whole = grad.new_zeros(self.target.num_tokens, grad.shape[1])
        return whole.index_copy_(0, index[:tokens], grad[:tokens])

    @property
    def _repeats_output(self) -> bool:
        return self.answers > 1 and not self.source.groups

    @cached_property
    def encoder_output_rows(self) -> Rows:
        """The layout of the encoder output as the decoder sees it: of rows end to end once for each answer, fillers
        last.
        """
        if not self._repeats_output:
            return self.source
        keys = None if self.source.keys is None else self.source.keys.repeat(self.answers)
        return Rows(self.source.lengths * self.answers, keys, self.source.filler * self.answers)

    def repeat_for_answers(self, output: Tensor) -> Tensor:
        """The encoder output (N, D) as the decoder sees it: of rows end to end for each answer, (N answers, D)."""
        if not self._repeats_output:
            return output
        rows, filler = output.split([self.source.row_tokens, self.source.filler])
        return torch.cat([*[rows] * self.answers, *[filler] * self.answers])

    def sum_over_answers(self, grad: Tensor) -> Tensor:
        """The backward of `repeat_for_answers`: (N answers, D) -> (N, D)."""
        if not self._repeats_output:
            return grad
        rows, filler = grad.split([self.answers * n for n in (self.source.row_tokens, self.source.filler)])
        return torch.cat([part.view(self.answers, -1, part.shape[1]).sum(0) for part in (rows, filler)])


def label_rows(target: Rows) -> Rows:
    """The layout of the labels of target rows: end to end, without padding, filled up to one of few numbers of
    tokens.
    """
    if not target.groups:
        return target
    return Rows(target.lengths, target.keys, padded_size(target.row_tokens) - target.row_tokens)
