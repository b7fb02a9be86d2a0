"""T5: embedding, encoder stack, decoder stack and output head.

An encoder-only model has no decoder and no head over the vocabulary; it may have one over labels (`model.label_head`).

A block maps tokens (N, D) to tokens (N, D) and keeps no state. What else it needs (layout of the rows, position bias,
dropout, encoder output) comes as arguments, so the engine can run any block alone, forward or recomputed for backward.
`T5.forward` runs all blocks under plain autograd: for notebooks, and as the reference of the tests of the engine.

Shapes: B rows, S source tokens of a row, T target tokens of a row, N tokens of all rows, D d_model, H heads, K d_kv,
L labels, V vocabulary. Source: Raffel et al. 2020 (arXiv 1910.10683); T5 1.1: Shazeer 2020; UMT5: Chung et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devices.base import traits_of
from devices.sizes import DRAWN_ELEMENTS
from model.attention import Attention, PositionBias, attends_compiled
from model.dropout import Dropout
from model.embedding_head import EmbeddingHead
from model.label_head import LabelHead, label_loss
from model.layers import FeedForward, RMSNorm, residual_dtype
from model.lora.form import AdapterInfo
from model.loss import IGNORED, LossSettings, MeanLoss, count_labels
from model.quantization import embed, is_int8, product
from model.rows import Rows, one_padded_group
from model.shapes import Role, inner_width, weights
from settings.declared import T5ModelConfig

if TYPE_CHECKING:
    from model.lora.token_rows import TrainedTokenRows

# weight -> a context in which it is in memory to be initialised; an offloaded weight is written back at the end.
Filling = Callable[[nn.Parameter], AbstractContextManager[None]]
# weights -> a context in which they are in memory and have the dtype of the computation.
WithWeights = Callable[[Iterable[nn.Parameter]], AbstractContextManager[object]]
# Every dropout of the model has a number, its site, from which its mask follows (`model.dropout`).
SITES_PER_BLOCK = 16  # More than a block uses.
DECODER_SITES = 1 << 20  # The first site of the decoder; those of the encoder begin at 0.


def in_memory(weight: nn.Parameter) -> AbstractContextManager[None]:
    """The `Filling` of weights that are not offloaded: does nothing."""
    return nullcontext()


def in_place(weights: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """The `WithWeights` of weights that are not offloaded: does nothing."""
    return nullcontext()


class Block(nn.Module):
    """Self-attention, then in a decoder cross-attention, then feed-forward, each as x + dropout(f(norm(x)))."""

    def __init__(self, config: T5ModelConfig, site: int, is_decoder: bool) -> None:
        super().__init__()
        self.site = site
        self.is_decoder = is_decoder
        self.attention_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.attention = Attention(config)
        self.bias = PositionBias(config, bidirectional=not is_decoder) if config.bias_in_every_layer else None
        if is_decoder:
            self.cross_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)
            self.cross_attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        dropout: Dropout,
        encoder_output: Tensor | None = None,
        encoder_rows: Rows | None = None,
        *,
        dtype: torch.dtype | None = None,
        graph_only: bool = False,
    ) -> Tensor:
        """The residual stream (N, D) after this block.

        Args:
            x: (N, D), the residual stream before it, laid out as `dropout.rows`.
            bias: the stack's `PositionBias` of these rows; unused where the block has its own.
            encoder_output, encoder_rows: (N', D) and its layout; for a decoder only.
            dtype: of the products; None: that of x.
            graph_only: the block is recomputed for backward, so only its graph is needed: the values of the result are
                undefined.
        """
        rows = dropout.rows
        drop = dropout.at(self.site)
        if self.bias is not None:
            bias = self.bias(rows.longest)
        # Sites in a block: 0 self-attention weights, 1 its output, 2 feed-forward output, 3 its inner activations,
        # 4 cross-attention weights, 5 its output.
        normed = self.attention_norm(x, dtype)
        x = x + drop.at(1)(self.attention(normed, normed, bias, (rows, rows), self.is_decoder, drop))
        if self.is_decoder:
            normed = self.cross_norm(x, dtype)
            sides = (rows, encoder_rows)
            x = x + drop.at(5)(self.cross_attention(normed, encoder_output, None, sides, False, drop.at(4)))
        inner = self.feed_forward(self.feed_forward_norm(x, dtype), drop.at(3), graph_only)
        return x + drop.at(2)(inner, graph_only)


class Stack(nn.Module):
    """The encoder or the decoder: blocks, the position bias that they share (none in UMT5), and the final norm."""

    def __init__(self, config: T5ModelConfig, count: int, is_decoder: bool) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.site = DECODER_SITES if is_decoder else 0
        # A factor on the decoder's hidden states before the head: d_model^-0.5 in T5 1.0, none elsewhere.
        is_scaled = is_decoder and config.scales_outputs
        self.output_scale = config.d_model**-0.5 if is_scaled else None
        self.bias = None if config.bias_in_every_layer else PositionBias(config, bidirectional=not is_decoder)
        sites = range(self.site + SITES_PER_BLOCK, self.site + (count + 1) * SITES_PER_BLOCK, SITES_PER_BLOCK)
        self.blocks = nn.ModuleList(Block(config, site, is_decoder) for site in sites)
        self.final_norm = RMSNorm(config.d_model, config.layer_norm_epsilon)

    def enter(self, x: Tensor, dropout: Dropout) -> Tensor:
        """The input of the first block: the embedded tokens (N, D) after dropout."""
        return dropout.at(self.site)(x)

    def leave(self, x: Tensor, dropout: Dropout, *, graph_only: bool = False) -> Tensor:
        """The output of the stack, from that of the last block (N, D): norm, dropout and, in a decoder, scaling.

        `graph_only` is as in `Block`.
        """
        x = dropout.at(self.site + 1)(self.final_norm(x), graph_only)
        return x if self.output_scale is None else x * self.output_scale

    def forward(
        self,
        x: Tensor,
        dropout: Dropout,
        encoder_output: Tensor | None = None,
        encoder_rows: Rows | None = None,
        *,
        dtype: torch.dtype,
        with_weights: WithWeights = in_place,
    ) -> Tensor:
        """The hidden states (N, D) of embedded tokens x (N, D), which are laid out as `dropout.rows`.

        Args:
            encoder_output, encoder_rows: as in `Block`.
            dtype: of the products and of the result.
            with_weights: the context in which each block runs.
        """
        x = self.enter(x, dropout)
        bias = None if self.bias is None else self.bias(dropout.rows.longest)
        for block in self.blocks:
            with with_weights(block.parameters()):
                x = block(x, bias, dropout, encoder_output, encoder_rows, dtype=dtype)
        return self.leave(x, dropout).to(dtype)


class T5(nn.Module):
    """A T5 model.

    Args:
        config: its shape.
        device: of the weights. They are allocated but not initialised: call `initialise` or load a checkpoint.
        dtype: of the weights; norms, bias tables and label heads are always fp32.
    Memory: the weights.
    """

    decoder: Stack  # Absent in an encoder-only model; see `stacks`.

    def __init__(
        self, config: T5ModelConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.d_kv = config.d_kv
        self.dropout_rate = config.dropout_rate
        # Set where adapters are added or loaded (`model.lora`):
        self.adapter_dropout = 0.0  # dropout rate on the input of adapters, in training
        self.token_rows: TrainedTokenRows | None = None  # embeddings of added tokens, trained beside the adapters
        self.adapter_info: AdapterInfo | None = None  # form and base of the active adapters
        with torch.device("meta"):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
            self.encoder = Stack(config, config.num_layers, is_decoder=False)
            if config.num_decoder_layers:
                self.decoder = Stack(config, config.num_decoder_layers, is_decoder=True)
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.d_model)) if config.has_own_table else None
            self.label_head = LabelHead(config) if config.num_labels else None
            self.embedding_head = EmbeddingHead(config) if config.gives_vectors else None
        # Only now allocate: dtypes differ by module, and on a GPU q, k and v are parts of one matrix.
        is_host = traits_of(torch.device(device)).is_host
        joined = set[nn.Parameter]()
        for module in self.modules():
            if isinstance(module, Attention) and not is_host:
                joined |= module.allocate_joined_qkv(device, dtype)
            own_dtype = torch.float32 if isinstance(module, (RMSNorm, PositionBias, nn.Linear)) else dtype
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight not in joined:
                    setattr(module, name, nn.Parameter(torch.empty(weight.shape, device=device, dtype=own_dtype)))

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by name: "encoder" and, if there is one, "decoder"."""
        return {name: module for name, module in self.named_children() if isinstance(module, Stack)}

    @property
    def output_weight(self) -> nn.Parameter:
        """The weight (V, D) that turns hidden states into logits: the embedding where the two are tied."""
        return self.embedding if self.head is None else self.head

    @property
    def float_dtype(self) -> torch.dtype:
        """The dtype of the computation without the engine: that of the weights, or fp32 if these are int8."""
        return torch.float32 if is_int8(self.embedding) else self.embedding.dtype

    @torch.no_grad()
    def initialise(self, seed: int, filling: Filling = in_memory, only: str = "") -> T5:
        """Give the weights T5's initial values: the same for the same seed, whatever the dtype or device.

        Args:
            filling: the context in which each weight is written.
            only: initialise only the weights whose names begin with this.
        """
        roles = {weight.name: weight.role for weight in weights(self.config)}
        for index, (name, weight) in enumerate(self.named_parameters()):
            if not name.startswith(only):
                continue
            with filling(weight):
                if roles[name] == "norm":
                    weight.fill_(1.0)
                elif roles[name] == "label bias":
                    weight.fill_(0.0)
                else:
                    self._draw(weight, roles[name], (seed * 1_000_003 + index) % 2**63)
        return self

    def _draw(self, weight: nn.Parameter, role: Role, seed: int) -> None:
        """Draw a matrix from a normal distribution, in chunks of rows, so that no fp32 copy of all of it is needed."""
        generator = torch.Generator().manual_seed(seed)
        deviation = self._initial_deviation(role)
        chunk_rows = max(1, DRAWN_ELEMENTS // weight.shape[1])
        for rows in weight.split(chunk_rows):
            rows.copy_(torch.randn(rows.shape, generator=generator) * deviation)

    def _initial_deviation(self, role: Role) -> float:
        c = self.config
        deviations: dict[Role, float] = {
            "embedding": 1.0,
            "q": (c.d_model * c.d_kv) ** -0.5,
            "o": inner_width(c) ** -0.5,
            "wo": c.d_ff**-0.5,
        }
        return deviations.get(role, c.d_model**-0.5) * c.initializer_factor

    def shift_right(self, labels: Tensor) -> Tensor:
        """Decoder input (B, T) for labels (B, T): the start token, then all labels but the last.

        Ignored labels (-100) become padding.
        """
        c = self.config
        shifted = labels.roll(1, 1)
        shifted[:, 0] = c.start_token_id
        return shifted.masked_fill(shifted == IGNORED, c.pad_token_id)

    def encode(self, ids: Tensor, rows: Rows, rate: float = 0.0) -> Tensor:
        """Encoder output (N, D) for ids (N,); `rate` is that of dropout."""
        x = embed(ids, self.embedding, residual_dtype(self.float_dtype))
        hidden: Tensor = self.encoder(x, Dropout(rate, rows), dtype=self.float_dtype)
        return hidden

    def decode(self, ids: Tensor, encoder_output: Tensor, rows: Rows, encoder_rows: Rows, rate: float = 0.0) -> Tensor:
        """Decoder output (N, D), the input of the head, for decoder ids (N,) and encoder output (N', D)."""
        x = embed(ids, self.embedding, residual_dtype(self.float_dtype))
        hidden: Tensor = self.decoder(x, Dropout(rate, rows), encoder_output, encoder_rows, dtype=self.float_dtype)
        return hidden

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor | None, decoder_ids: Tensor, rate: float) -> Tensor:
        """Decoder output (N, D) for padded ids (B, S) and decoder ids (B, T)."""
        source = self._rows(input_ids, attention_mask, rate)
        encoder_output = self.encode(source.flatten(input_ids), source, rate)
        target = replace(self._target_rows(decoder_ids), keys=source.keys)
        return self.decode(target.flatten(decoder_ids), encoder_output, target, source, rate)

    def _target_rows(self, decoder_ids: Tensor) -> Rows:
        """The layout of decoder ids (B, T): padding counts as tokens, since its labels are ignored."""
        return self.lay_out((decoder_ids.shape[1],) * len(decoder_ids))

    def label_logits(self, input_ids: Tensor, attention_mask: Tensor | None = None, rate: float = 0.0) -> Tensor:
        """Logits of the head over labels, fp32: (B, L), or of a token head (B, S, L) with 0 for padding.

        Args:
            input_ids, attention_mask: as in `forward`.
            rate: of dropout.
        """
        if self.label_head is None:
            raise ValueError("the model has no head over labels")
        rows = self._rows(input_ids, attention_mask, rate)
        hidden = self.encode(rows.flatten(input_ids), rows, rate)
        if len(self.stacks) > 1:
            hidden = self.decode(rows.flatten(self.shift_right(input_ids)), hidden, rows, rows, rate)
        logits: Tensor = self.label_head(hidden, rows, rate)
        if self.label_head.pooling is not None:
            return logits
        padded = nn.utils.rnn.pad_sequence(logits.split(rows.lengths), batch_first=True)
        return F.pad(padded, (0, 0, 0, input_ids.shape[1] - padded.shape[1]))

    def logits(self, input_ids: Tensor, decoder_input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) in fp32 for ids (B, S) and decoder ids (B, T); the mask is as in `forward`."""
        hidden = self._hidden(input_ids, attention_mask, decoder_input_ids, 0.0)
        hidden = self._target_rows(decoder_input_ids).tokens(hidden)
        return product(hidden, self.output_weight).float().view(*decoder_input_ids.shape, -1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Mean loss per label token, differentiable by plain autograd.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, S), in each row ones for tokens, then zeros for padding; None: no padding.
            labels: (B, T) int64, -100 where the loss ignores them. With a head over labels (B,), or (B, S) for one per
                token: int64 classes, or for regression floats, nan where the loss ignores them.
        Returns:
            a fp32 scalar.
        """
        if labels is None:
            raise ValueError("labels are needed for a loss; use logits() for outputs")
        rate = self.dropout_rate if self.training else 0.0
        if self.label_head is not None:
            labels = labels.reshape(-1)
            logits = self.label_logits(input_ids, attention_mask, rate)
            return label_loss(logits.reshape(len(labels), -1), labels) / count_labels(labels).clamp(min=1)
        hidden = self._hidden(input_ids, attention_mask, self.shift_right(labels), rate)
        hidden = self._target_rows(labels).tokens(hidden)
        # MeanLoss gives no gradient to the trained rows that stand in for those of the output weight.
        if self.token_rows is not None:
            return F.cross_entropy(
                product(hidden, self.output_weight).float(), labels.reshape(-1), ignore_index=IGNORED
            )
        return MeanLoss.apply(hidden, self.output_weight, labels.reshape(-1), LossSettings())

    def _rows(self, ids: Tensor, mask: Tensor | None, rate: float) -> Rows:
        """The layout of padded ids (B, S), with new random keys if there is dropout."""
        keys = torch.randint(-(2**62), 2**62, (len(ids),)) if rate else None
        mask = torch.ones_like(ids) if mask is None else mask
        lengths = mask.sum(1)
        positions = torch.arange(mask.shape[1], device=mask.device)
        if not torch.equal(mask.bool(), positions < lengths[:, None]) or int(lengths.min()) < 1:
            raise ValueError(
                "attention_mask: each row must be ones, then zeros, with at least one one (pad on the right)"
            )
        return self.lay_out(tuple(lengths.tolist()), keys)

    def lay_out(self, lengths: tuple[int, ...], keys: Tensor | None = None) -> Rows:
        """The layout of rows of these lengths: without padding for compiled kernels, else padded in groups.

        Args:
            lengths: tokens of each row.
            keys: of their dropout masks, as in `Rows`.
        """
        if attends_compiled(self.d_kv, self.embedding.device):
            return Rows(lengths, keys)
        return one_padded_group(lengths, keys)
