"""A head over labels: from hidden states to the class or number of a row, or of each token; and its loss.

    sequence:  pool the tokens of a row; dropout, dense, tanh, dropout, out
    token:     each token; dropout, out

Its weights are fp32 whatever the model's are, and so is all that it computes. Linear heads leave out dense, tanh and
the second dropout.

Shapes: N tokens of all rows end to end, B rows, D d_model, L outputs.
Source: `T5ClassificationHead` and `T5ForTokenClassification` of transformers; mean pooling before a dense head:
Schmirler et al. 2024 (Nature Communications 15, 7407).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.dropout import Dropout
from model.loss import IGNORED
from model.rows import Rows
from settings.declared import T5ModelConfig

LABEL_SITES = 1 << 21  # The sites of its dropout begin here.
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda tokens: tokens[0],
    "last": lambda tokens: tokens[-1],
    "mean": lambda tokens: tokens.mean(0),
}


class LabelHead(nn.Module):
    """A head over the labels of `config`."""

    def __init__(self, config: T5ModelConfig) -> None:
        super().__init__()
        self.pooling = config.head_pooling if config.pools_rows else None
        self.dense = nn.Linear(config.d_model, config.d_model) if config.has_dense_head else None
        self.out = nn.Linear(config.d_model, config.num_labels)

    def forward(self, hidden: Tensor, rows: Rows, rate: float = 0.0) -> Tensor:
        """hidden (N, D) -> fp32 (B, L) of a sequence head, (tokens of all rows without padding, L) of a token head."""
        x = rows.tokens(hidden).float()
        if self.pooling is not None:
            x = torch.stack(list(map(POOLS[self.pooling], x.split(rows.lengths))))
            rows = Rows((1,) * len(rows.lengths), rows.keys)
        dropout = Dropout(rate, Rows(rows.lengths, rows.keys)).at(LABEL_SITES)
        dropout.begin(x.device)
        x = dropout(x)
        if self.dense is not None:
            x = dropout.at(1)(self.dense(x).tanh())
        logits: Tensor = self.out(x)
        return logits


def label_loss(
    logits: Tensor, labels: Tensor, class_weights: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """The summed loss: cross-entropy of classes, squared error of numbers.

    Args:
        logits: (M, L) fp32. labels: (M,) int64 classes, IGNORED without a loss; or numbers, nan without one.
        class_weights: (L,) fp32, factor on the loss of each class.
    """
    if labels.is_floating_point():
        # Indexing would wait for a GPU.
        return (logits.squeeze(1) - labels).masked_fill(labels.isnan(), 0.0).square().sum()
    return F.cross_entropy(
        logits, labels, class_weights, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )
