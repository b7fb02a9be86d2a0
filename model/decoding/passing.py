"""How do tokens pass through the model to be answered? Prompts through the encoder, then one token a row through the decoder.

What differs between ways of writing is where keys and values lie, so attention is handed in: `kv_cache` has one batch
whose rows begin together, `running` rows that come and go.

Shapes: N tokens, D d_model, H heads, K d_kv, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from devices.malloc import trim_malloc
from model.dropout import Dropout
from model.quantization import embed, few_rows, product
from model.rows import Rows
from model.t5 import T5, DecoderBlock
from settings.errors import UserError

WithWeights = Callable[[Iterable[nn.Parameter]], AbstractContextManager[object]]
AttendOwn = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v of the newest tokens (N, H, K) -> (N, H K)
AttendSource = Callable[[Tensor], Tensor]  # q (N, H, K) -> (N, H K)


def in_place(weights: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Weights are used in place."""
    return nullcontext()


class Passing:
    """A model that answers; nothing is remembered here.

    Args:
        model: in any mode; dropout is never applied.
        with_weights: a context around each use of a block, made of its weights (`engine.weights`).
        compute_dtype: what `with_weights` makes of the weights; None: the embedding's dtype.
    """

    def __init__(
        self, model: T5, with_weights: WithWeights = in_place, compute_dtype: torch.dtype | None = None
    ) -> None:
        self.model, self.with_weights = model, with_weights
        self.dtype, self.device = compute_dtype or model.float_dtype, model.embedding.device
        self.blocks: list[DecoderBlock] = list(model.decoder.blocks)  # type: ignore[arg-type]

    def _embed(self, ids: Tensor) -> Tensor:
        return embed(ids, self.model.embedding, self.dtype)

    def encode(self, ids: Tensor, rows: Rows) -> Tensor:
        """Encoder output (N, D) of ids (N,). What malloc keeps of other lengths is given back before, and its own after."""
        stack, dropout = self.model.encoder, Dropout(0.0, rows)
        self.trim()
        x = self._embed(ids)
        bias = None if stack.bias is None else stack.bias(rows.longest)
        for block in stack.blocks:
            with self.with_weights(block.parameters()):
                x = block(x, bias, rows, dropout)
        output = stack.leave(x, dropout)
        self.trim()
        return output

    def trim(self) -> None:
        """Give back what malloc holds free, where tensors lie in its heap."""
        if self.device.type == "cpu":
            trim_malloc()

    def sources(self, encoder_output: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each decoder block the keys and values (N, H, K) of the encoder's output (N, D)."""
        for block in self.blocks:
            attention = block.cross_attention
            with self.with_weights(block.parameters()):
                keys, values = (attention.heads(matrix(encoder_output)) for matrix in (attention.k, attention.v))
            yield keys, values

    def biases(self, longest: int) -> list[Tensor]:
        """For each decoder block the bias (H, 2 longest - 1) of a token towards those before it, itself in the middle, then -inf."""
        shared = self.model.decoder.bias
        if shared is not None:
            return [shared(longest).to(self.dtype)] * len(self.blocks)
        return [block.bias(longest).to(self.dtype) for block in self.blocks if block.bias is not None]

    def step(self, ids: Tensor, ways: Sequence[tuple[AttendOwn, AttendSource]]) -> Tensor:
        """One more token of each row: ids (N,) int64 -> next logits (N, V) fp32.

        Args:
            ways: how each block attends to the tokens before, and to the source.
        """
        x, no_drop = self._embed(ids), Dropout(0.0, Rows((1,) * len(ids)))
        with few_rows():
            for block, way in zip(self.blocks, ways, strict=True):
                with self.with_weights(block.parameters()):
                    x = _through(block, x, way, no_drop)
            hidden = self.model.decoder.final_norm(x) * self.model.output_scale
            return product(hidden, self.model.output_weight).float()


def _through(block: DecoderBlock, x: Tensor, way: tuple[AttendOwn, AttendSource], no_drop: Dropout) -> Tensor:
    """One block for one token a row: x (N, D) -> (N, D)."""
    attend_own, attend_source = way
    attention, cross = block.attention, block.cross_attention
    normed = block.attention_norm(x)
    q, k, v = (attention.heads(matrix(normed)) for matrix in (attention.q, attention.k, attention.v))
    x = x + attention.o(attend_own(q, k, v))
    x = x + cross.o(attend_source(cross.heads(cross.q(block.cross_norm(x)))))
    return x + block.feed_forward(block.feed_forward_norm(x), no_drop)


def check_ids(model: T5, input_ids: Sequence[Sequence[int]]) -> None:
    """Refuse prompts that the model cannot read.

    Raises:
        UserError: an id outside of the vocabulary.
    """
    if any(len(ids) == 0 for ids in input_ids):
        raise ValueError("input_ids: each row needs at least one token (the end token)")
    vocab_size = model.config.vocab_size
    foreign = next((i for ids in input_ids for i in ids if not 0 <= i < vocab_size), None)
    if foreign is not None:
        raise UserError(
            f"token id {foreign}, is outside of the model's vocabulary (0 to {vocab_size - 1}); "
            "use the tokenizer that the model was trained with"
        )
