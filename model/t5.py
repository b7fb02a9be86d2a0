"""T5: embedding, encoder stack, decoder stack, output head; a row of blocks that the engine runs one by one.

An encoder has no decoder and no head over the vocabulary; it may have one over labels (`model.label_head`).

A block maps tokens (N, D) to tokens (N, D) and keeps nothing; what it needs besides (layout of the rows, position bias,
dropout, encoder output) comes as arguments, so that the engine can run any block alone, forward or again for backward.
`T5.forward` strings the blocks together under plain autograd: the form for notebooks, and the oracle of the engine.

Shapes: B rows, S source, T target, N tokens of all rows end to end, D d_model, H heads, K d_kv, F d_ff, V vocabulary,
R distances. Source: Raffel et al. 2020 (arXiv 1910.10683); T5 1.1: Shazeer 2020; UMT5: Chung et al. 2023.
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

# A context in which a weight is in memory to be filled; where weights rest elsewhere it goes there afterwards.
Filling = Callable[[nn.Parameter], AbstractContextManager[None]]
# A context around each use of some weights, in which they are in memory and as they are computed with.
WithWeights = Callable[[Iterable[nn.Parameter]], AbstractContextManager[object]]
SITES_PER_BLOCK = 16  # One block has fewer sites of dropout.
DECODER_SITES = 1 << 20  # The decoder's sites of dropout begin here.


def in_memory(weight: nn.Parameter) -> AbstractContextManager[None]:
    """Weights are in memory anyway."""
    return nullcontext()


def in_place(weights: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Weights are used in place."""
    return nullcontext()


class Block(nn.Module):
    """Self-attention, in the decoder attention to the encoder's output, and feed-forward: x + f(norm(x)) each."""

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
        """x (N, D) of `dropout.rows`, bias as of `PositionBias` unless the block has its own, encoder_output (N', D)
        for a decoder -> (N, D).

        Args:
            dtype: of products; None: that of x. graph_only: the block is recomputed for backward alone: what only its
                result needs is left out.
        """
        rows = dropout.rows
        drop = dropout.at(self.site)
        bias = self.bias(rows.longest) if self.bias is not None else bias
        normed = self.attention_norm(x, dtype)
        x = x + drop.at(1)(self.attention(normed, normed, bias, (rows, rows), self.is_decoder, drop))
        if self.is_decoder:
            normed = self.cross_norm(x, dtype)
            sides = (rows, encoder_rows)
            x = x + drop.at(5)(self.cross_attention(normed, encoder_output, None, sides, False, drop.at(4)))
        inner = self.feed_forward(self.feed_forward_norm(x, dtype), drop.at(3), graph_only)
        return x + drop.at(2)(inner, graph_only)


class Stack(nn.Module):
    """A row of blocks, the position bias that they share (none in UMT5), and the norm after the last."""

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
        """Dropout of the embedded tokens (N, D)."""
        return dropout.at(self.site)(x)

    def leave(self, x: Tensor, dropout: Dropout, *, graph_only: bool = False) -> Tensor:
        """The norm after the last block, its dropout, and the decoder's factor: (N, D); `graph_only` as in `Block`."""
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
        """Embedded tokens (N, D) of `dropout.rows` through all blocks: (N, D) in `dtype`, in which products are formed.

        Args:
            with_weights: a context around each use of a block, made of its weights.
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
        device, dtype: where and as what the weights are made; norms, bias tables and label heads are always fp32. Made,
            not filled: call `initialise` or load a checkpoint.
    Memory: the weights.
    """

    decoder: Stack  # An encoder has none: `stacks` has those that there are.

    def __init__(
        self, config: T5ModelConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        self.d_kv = config.d_kv
        self.dropout_rate = config.dropout_rate
        self.adapter_dropout = 0.0  # Share dropped of what adapters read, in training: see `model.lora.adapter`.
        self.token_rows: TrainedTokenRows | None = None  # Rows of tokens that learn beside adapters.
        self.adapter_info: AdapterInfo | None = None  # Form and base of the adapters that are on.
        with torch.device("meta"):
            self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
            self.encoder = Stack(config, config.num_layers, is_decoder=False)
            if config.num_decoder_layers:
                self.decoder = Stack(config, config.num_decoder_layers, is_decoder=True)
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.d_model)) if config.has_own_table else None
            self.label_head = LabelHead(config) if config.num_labels else None
        is_host = traits_of(torch.device(device)).is_host
        stacked = set[nn.Parameter]()
        for module in self.modules():
            if isinstance(module, Attention) and not is_host:
                stacked |= module.allocate_joined_qkv(device, dtype)
            own_dtype = torch.float32 if isinstance(module, (RMSNorm, PositionBias, nn.Linear)) else dtype
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight not in stacked:
                    setattr(module, name, nn.Parameter(torch.empty(weight.shape, device=device, dtype=own_dtype)))

    @property
    def stacks(self) -> dict[str, Stack]:
        """Encoder, and decoder unless there is none."""
        return {name: module for name, module in self.named_children() if isinstance(module, Stack)}

    @property
    def output_weight(self) -> nn.Parameter:
        """(V, D): what turns hidden states into logits; the embedding itself where tied."""
        return self.embedding if self.head is None else self.head

    @property
    def float_dtype(self) -> torch.dtype:
        """What the model computes in where no weight store widens its weights: their dtype, fp32 where they are
        int8.
        """
        return torch.float32 if is_int8(self.embedding) else self.embedding.dtype

    @torch.no_grad()
    def initialise(self, seed: int, filling: Filling = in_memory, only: str = "") -> T5:
        """Fill the weights with T5's initial values: the same for the same seed, whatever the dtype or device.

        Args:
            filling: a context around the filling of each weight. only: how the names of those begin that are filled.
        """
        roles = {weight.name: weight.role for weight in weights(self.config)}
        for index, (name, weight) in enumerate(self.named_parameters()):
            if not name.startswith(only):
                continue
            with filling(weight):
                if roles[name] in ("norm", "label bias"):
                    weight.fill_(float(roles[name] == "norm"))
                else:
                    self._draw(weight, roles[name], (seed * 1_000_003 + index) % 2**63)
        return self

    def _draw(self, weight: nn.Parameter, role: Role, seed: int) -> None:
        """Fill a matrix in row chunks: the fp32 draw is never whole in memory."""
        generator = torch.Generator().manual_seed(seed)
        deviation = self._initial_deviation(role)
        step = max(1, DRAWN_ELEMENTS // weight.shape[1])
        for rows in weight.split(step):
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
        """Decoder input for labels (B, T): the start token, then all labels but the last; ignored labels become
        padding.
        """
        c = self.config
        shifted = labels.roll(1, 1)
        shifted[:, 0] = c.start_token_id
        return shifted.masked_fill(shifted == IGNORED, c.pad_token_id)

    def encode(self, ids: Tensor, rows: Rows, rate: float = 0.0) -> Tensor:
        """Encoder output (N, D) of ids (N,)."""
        x = embed(ids, self.embedding, residual_dtype(self.float_dtype))
        hidden: Tensor = self.encoder(x, Dropout(rate, rows), dtype=self.float_dtype)
        return hidden

    def decode(self, ids: Tensor, encoder_output: Tensor, rows: Rows, encoder_rows: Rows, rate: float = 0.0) -> Tensor:
        """What the head multiplies (N, D), for decoder ids (N,) and the encoder's output (N', D)."""
        x = embed(ids, self.embedding, residual_dtype(self.float_dtype))
        hidden: Tensor = self.decoder(x, Dropout(rate, rows), encoder_output, encoder_rows, dtype=self.float_dtype)
        return hidden

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor | None, decoder_ids: Tensor, rate: float) -> Tensor:
        source = self._rows(input_ids, attention_mask, rate)
        encoder_output = self.encode(source.flatten(input_ids), source, rate)
        target = replace(self._target_rows(decoder_ids), keys=source.keys)
        return self.decode(target.flatten(decoder_ids), encoder_output, target, source, rate)

    def _target_rows(self, decoder_ids: Tensor) -> Rows:
        return self.lay_out((decoder_ids.shape[1],) * len(decoder_ids))

    def label_logits(self, input_ids: Tensor, attention_mask: Tensor | None = None, rate: float = 0.0) -> Tensor:
        """Logits of a head over labels, fp32: (B, L), or (B, S, L) of a token head, 0 for padding.

        Args:
            input_ids, attention_mask: as of `forward`. rate: of dropout.
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
        """Logits (B, T, V) fp32 of ids (B, S) and decoder ids (B, T); mask (B, S) ones, then zeros for padding."""
        hidden = self._hidden(input_ids, attention_mask, decoder_input_ids, 0.0)
        hidden = self._target_rows(decoder_input_ids).tokens(hidden)
        return product(hidden, self.output_weight).float().view(*decoder_input_ids.shape, -1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Mean loss per label token, differentiable by plain autograd.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, S), ones and then zeros in each row; None: no padding.
            labels: (B, T) int64, -100 where no loss is wanted. With a head over labels (B,) or (B, S): int64, or
                numbers, nan where no loss is wanted.
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
        hidden = self._target_rows(labels).tokens(
            self._hidden(input_ids, attention_mask, self.shift_right(labels), rate)
        )
        if self.token_rows is not None:
            return F.cross_entropy(
                product(hidden, self.output_weight).float(), labels.reshape(-1), ignore_index=IGNORED
            )
        return MeanLoss.apply(hidden, self.output_weight, labels.reshape(-1), LossSettings())

    def _rows(self, ids: Tensor, mask: Tensor | None, rate: float) -> Rows:
        """The rows of padded ids (B, S), with keys drawn anew where dropout needs some."""
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
        """Rows as this model attends to them, in their order: side by side, or for compiled kernels end to end."""
        if attends_compiled(self.d_kv, self.embedding.device):
            return Rows(lengths, keys)
        return one_padded_group(lengths, keys)
