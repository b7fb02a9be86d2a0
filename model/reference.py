"""A plain T5 in one file: padded batches, ordinary autograd, nothing saved in memory. Read it before `model.t5`.

The tests hold `model.t5`, its attention and the engine against it. Weights have the same names, so
`T5Reference(config).load_state_dict(t5.state_dict())` copies them; parts that do the same have the same names too.

Shapes: B rows, S source length, T target length, D d_model, H heads, K d_kv, F d_ff, V vocabulary.
Source: Raffel et al. 2020 (arXiv 1910.10683); gated activations of T5 1.1: Shazeer 2020 (arXiv 2002.05202); a position
bias in every layer: UMT5, Chung et al. 2023 (arXiv 2304.09151).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from settings.declared import T5ModelConfig


class T5Reference(nn.Module):
    """An encoder-decoder transformer: (B, S) and (B, T) token ids to (B, T, V) logits."""

    def __init__(self, config: T5ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.start_token_id = config.start_token_id
        self.pad_token_id = config.pad_token_id
        self.output_scale = (
            config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
        )  # Later versions do not scale.
        self.embedding = nn.Parameter(torch.randn(config.vocab_size, config.d_model))
        self.encoder = Stack(config, config.num_layers, is_decoder=False)
        self.decoder = Stack(config, config.num_decoder_layers, is_decoder=True)
        tied = config.tie_word_embeddings
        self.head = None if tied else nn.Parameter(torch.randn(config.vocab_size, config.d_model))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy per label.

        Args:
            input_ids: (B, S) int64. attention_mask: (B, S), 1 for a token and 0 for padding.
            labels: (B, T) int64, -100 where no loss is wanted.
        """
        logits = self.logits(input_ids, self.shift_right(labels), attention_mask)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def logits(self, input_ids: Tensor, decoder_input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores of every next token: (B, T, V)."""
        return self.decode(decoder_input_ids, self.encode(input_ids, attention_mask), attention_mask)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """What the decoder attends to: (B, S, D)."""
        encoded: Tensor = self.encoder(F.embedding(input_ids, self.embedding), attention_mask == 0)
        return encoded

    def decode(self, decoder_input_ids: Tensor, encoded: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores of every next token: (B, T, V)."""
        hidden = self.decoder(F.embedding(decoder_input_ids, self.embedding), None, encoded, attention_mask == 0)
        return hidden * self.output_scale @ (self.embedding if self.head is None else self.head).T

    def shift_right(self, labels: Tensor) -> Tensor:
        """What the decoder reads to predict labels (B, T): the start token, then all labels but the last."""
        start = labels.new_full((len(labels), 1), self.start_token_id)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, self.pad_token_id)], 1)


class Stack(nn.Module):
    """Blocks over one residual stream, and a norm behind the last."""

    def __init__(self, config: T5ModelConfig, count: int, is_decoder: bool) -> None:
        super().__init__()
        self.bias = None if config.bias_in_every_layer else PositionBias(config, is_decoder)
        self.blocks = nn.ModuleList(Block(config, is_decoder) for _ in range(count))
        self.final_norm = RMSNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        encoded: Tensor | None = None,
        encoded_padding: Tensor | None = None,
    ) -> Tensor:
        """x (B, L, D) -> (B, L, D); paddings (B, length) are True where a key is padding."""
        x = self.dropout(x)
        bias = None if self.bias is None else self.bias(x.shape[1])
        for block in self.blocks:
            x = block(x, bias, padding, encoded, encoded_padding)
        return self.dropout(self.final_norm(x))


class Block(nn.Module):
    """Self-attention, in the decoder attention to the encoder's output, and feed-forward: x + f(norm(x)) each."""

    def __init__(self, config: T5ModelConfig, is_decoder: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config)
        self.bias = PositionBias(config, is_decoder) if config.bias_in_every_layer else None
        if is_decoder:
            self.cross_norm = RMSNorm(config)
            self.cross_attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        padding: Tensor | None,
        encoded: Tensor | None,
        encoded_padding: Tensor | None,
    ) -> Tensor:
        """x (B, L, D) -> (B, L, D); `bias` (H, L, L) is the stack's, unless the block has its own."""
        bias = bias if self.bias is None else self.bias(x.shape[1])
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, bias, padding))
        if encoded is not None:
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), encoded, None, encoded_padding))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Attention(nn.Module):
    """softmax(q k^T + bias) v over H heads; T5 does not divide by sqrt(K), its initial weights do that."""

    def __init__(self, config: T5ModelConfig) -> None:
        super().__init__()
        inner = config.num_heads * config.d_kv
        self.num_heads = config.num_heads
        self.q = nn.Linear(config.d_model, inner, bias=False)
        self.k = nn.Linear(config.d_model, inner, bias=False)
        self.v = nn.Linear(config.d_model, inner, bias=False)
        self.o = nn.Linear(inner, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None, padding: Tensor | None) -> Tensor:
        """Queries of x (B, L, D), keys and values of source (B, M, D) -> (B, L, D)."""
        q, k, v = (  # (B, H, length, K)
            product(value).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for product, value in ((self.q, x), (self.k, source), (self.v, source))
        )
        scores = q @ k.transpose(2, 3)  # (B, H, L, M)
        if bias is not None:
            scores = scores + bias
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], -math.inf)
        weights = self.dropout(scores.softmax(-1))
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class PositionBias(nn.Module):
    """A learned number per head and bucket of distances, added to the scores; it also hides the future from a
    decoder.
    """

    def __init__(self, config: T5ModelConfig, is_decoder: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(config.relative_attention_num_buckets, config.num_heads))
        self.is_decoder = is_decoder
        self.max_distance = config.relative_attention_max_distance

    def forward(self, length: int) -> Tensor:
        """(H, L, L): row is the query, column the key."""
        positions = torch.arange(length)
        distances = positions[None, :] - positions[:, None]
        bias = self.table[self._buckets(distances)].permute(2, 0, 1)
        return bias.masked_fill(distances > 0, -math.inf) if self.is_decoder else bias

    def _buckets(self, distances: Tensor) -> Tensor:
        """Half of the buckets are one distance each, the other half grow logarithmically up to `max_distance`."""
        count = len(self.table)
        offset = torch.zeros_like(distances)
        if self.is_decoder:
            distances = (-distances).clamp(min=0)
        else:
            count //= 2  # The second half is for keys that stand behind the query.
            offset = (distances > 0) * count
            distances = distances.abs()
        exact = count // 2
        growth = (distances.clamp(min=1) / exact).log() / math.log(self.max_distance / exact)
        far = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
        return offset + torch.where(distances < exact, distances, far)


class FeedForward(nn.Module):
    """wo(relu(wi(x))), or wo(act(gate(x)) * wi(x)) in T5 1.1 and later."""

    def __init__(self, config: T5ModelConfig) -> None:
        super().__init__()
        self.activation = config.feed_forward_proj
        if self.activation != "relu":
            self.gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, D) -> (B, L, D) by way of (B, L, F)."""
        if self.activation == "relu":
            inner = F.relu(self.wi(x))
        elif self.activation == "gated-gelu":
            inner = F.gelu(self.gate(x), approximate="tanh") * self.wi(x)
        else:
            inner = F.silu(self.gate(x)) * self.wi(x)
        return self.wo(self.dropout(inner))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight: no mean is subtracted, no bias added."""

    def __init__(self, config: T5ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.epsilon = config.layer_norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, D) -> (B, L, D)."""
        return x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * self.weight
