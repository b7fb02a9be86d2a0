"""A head that gives a vector for each text: pooling, a matrix where the vectors have a width of their own, length 1.

All that it computes is fp32 whatever the model's weights are, as is its matrix.

Shapes: N tokens of all texts, R texts, D d_model, V width of the vectors.
Source: modules Pooling, Dense (without bias and activation, as published T5 encoders have it) and Normalize of
sentence-transformers 6.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.rows import Rows
from settings.declared import T5ModelConfig


class EmbeddingHead(nn.Module):
    """The vectors of `config`."""

    def __init__(self, config: T5ModelConfig) -> None:
        super().__init__()
        self.pooling = config.head_pooling
        self.normalizes = config.normalize
        size = config.embedding_size
        self.dense = nn.Linear(config.d_model, size, bias=False) if size else None

    def pool(self, hidden: Tensor, rows: Rows) -> Tensor:
        """hidden (N, D) -> fp32 (R, D): of each text the mean over its tokens, its first or its last one."""
        tokens = rows.tokens(hidden)
        lengths = torch.tensor(rows.lengths, device=hidden.device)
        if self.pooling == "mean":
            # `tokens` are end to end: text 0 first.
            text_of_token = torch.repeat_interleave(lengths, output_size=len(tokens))
            sums = torch.zeros(len(rows.lengths), tokens.shape[1], device=tokens.device)
            return sums.index_add(0, text_of_token, tokens.float()) / lengths[:, None]
        ends = lengths.cumsum(0)
        index = ends - lengths if self.pooling == "first" else ends - 1
        return tokens.index_select(0, index).float()

    def forward(self, pooled: Tensor) -> Tensor:
        """pooled (R, D) -> the vectors (R, V)."""
        vectors = pooled if self.dense is None else self.dense(pooled)
        return F.normalize(vectors, dim=-1) if self.normalizes else vectors
