"""The decoder at work: prompts pass through the encoder once, then each step adds one token to every row that is being answered.

One `Decoder` writes all answers: greedy, drawn, by beams, and of rows that come and go (continuous batching: Yu et al.
2022, Orca, OSDI). No answer depends on the rows beside it.

Shapes: n rows, G beams of each (1 without a search), N tokens, D d_model, H heads, K d_kv, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from devices.malloc import trim_malloc
from limits import ENCODER_TOKENS, TILE_ELEMENTS
from model.decoding.answer_tree import Choices
from model.decoding.kv_cache import KVCache
from model.dropout import Dropout
from model.layers import residual_dtype
from model.quantization import embed, few_rows, product
from model.rows import Rows
from model.t5 import T5, DecoderBlock, WithWeights, in_place
from settings.errors import UserError


class Decoder:
    """Rows that are being answered, their keys and values in `cache`.

    Args:
        model: in any mode; dropout is never applied.
        with_weights: a context around each use of a block, made of its weights (`engine.weights`).
        compute_dtype: what `with_weights` makes of the weights; None: the embedding's dtype.
        num_beams: G, answers of each prompt that are written side by side.
    Memory: that of `KVCache`; the encoder's activations of one block for at most ENCODER_TOKENS tokens, or for the longest
        prompt; logits of one step.
    """

    def __init__(
        self,
        model: T5,
        with_weights: WithWeights = in_place,
        compute_dtype: torch.dtype | None = None,
        num_beams: int = 1,
    ) -> None:
        self.model, self.with_weights = model, with_weights
        self.dtype, self.device = compute_dtype or model.float_dtype, model.embedding.device
        self.cache = KVCache(model, self.dtype, num_beams)
        self.blocks: list[DecoderBlock] = list(model.decoder.blocks)  # type: ignore[arg-type]
        self._prompts: list[tuple[int, ...]] = []

    @torch.no_grad()
    def join(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        """Read more prompts, whose answers are written from the next step on; one that is being answered is not read again.

        Args:
            prompts: one list of token ids each, with its end token. limit: most tokens of an answer.
        Raises:
            UserError: an id outside of the vocabulary.
        """
        _check_ids(self.model, prompts)
        first = len(self._prompts)
        same = (
            self._prompts.index(tuple(prompts[0])) if len(prompts) == 1 and tuple(prompts[0]) in self._prompts else None
        )
        try:
            self.cache.add([len(ids) for ids in prompts], limit)
            if same is not None:
                self.cache.copy_source(same)
            else:
                self._read(prompts, first)
        except BaseException:
            self.cache.drop(range(first, first + len(prompts)))
            raise
        self._prompts += map(tuple, prompts)

    def _read(self, prompts: Sequence[Sequence[int]], first: int) -> None:
        """Keys and values of prompts, which are the rows from `first` on, in groups that the encoder takes together."""
        for group in _groups([len(ids) for ids in prompts]):
            rows = Rows(tuple(len(prompts[row]) for row in group))
            encoded = self._encode([token for row in group for token in prompts[row]], rows)
            for number, block in enumerate(self.blocks):
                cross = block.cross_attention
                with self.with_weights(block.parameters()):
                    keys, values = (cross.heads(matrix(encoded)) for matrix in (cross.k, cross.v))
                for row, start, length in zip(group, rows.starts, rows.lengths, strict=True):
                    part = slice(start, start + length)
                    self.cache.fill(number, first + row, keys[part], values[part])

    def _encode(self, ids: list[int], rows: Rows) -> Tensor:
        """Encoder output (N, D). What malloc keeps of other lengths is given back before, and its own after."""
        stack, dropout = self.model.encoder, Dropout(0.0, rows)
        self._trim()
        x = embed(torch.tensor(ids, device=self.device), self.model.embedding, residual_dtype(self.dtype))
        bias = None if stack.bias is None else stack.bias(rows.longest)
        for block in stack.blocks:
            with self.with_weights(block.parameters()):
                x = block(x, bias, rows, dropout, dtype=self.dtype)
        output = stack.leave(x, dropout).to(self.dtype)
        self._trim()
        return output

    def _trim(self) -> None:
        if self.device.type == "cpu":
            trim_malloc()

    @torch.no_grad()
    def step(self, ids: Sequence[int] | Tensor, choices: Choices | None = None) -> Tensor:
        """Append one token to the first g beams of each row: n g ids, those of a row side by side -> next logits (n g, V) fp32.

        Without beams a step that failed may be repeated.

        Args:
            choices: of k beams, from a list of answers: the logits are theirs, (k, W), -inf where there is no token.
        """
        self.cache.begin_step(len(ids) // len(self._prompts))
        x = embed(torch.as_tensor(ids, device=self.device), self.model.embedding, residual_dtype(self.dtype))
        no_drop = Dropout(0.0, Rows((1,) * len(ids)))
        with few_rows():
            for number, block in enumerate(self.blocks):
                attention, cross = block.attention, block.cross_attention
                with self.with_weights(block.parameters()):
                    normed = block.attention_norm(x, self.dtype)
                    q, k, v = (attention.heads(matrix(normed)) for matrix in (attention.q, attention.k, attention.v))
                    x = x + attention.o(self.cache.attend_own(number, q, k, v))
                    q = cross.heads(cross.q(block.cross_norm(x, self.dtype)))
                    x = x + cross.o(self.cache.attend_source(number, q))
                    x = x + block.feed_forward(block.feed_forward_norm(x, self.dtype), no_drop)
            hidden = (self.model.decoder.final_norm(x) * self.model.output_scale).to(self.dtype)
            logits = (
                product(hidden, self.model.output_weight).float() if choices is None else self._some(hidden, choices)
            )
        self.cache.lengths = [length + 1 for length in self.cache.lengths]
        return logits

    def _some(self, hidden: Tensor, choices: Choices) -> Tensor:
        rows, tokens, places = (
            torch.from_numpy(found).to(self.device) for found in (choices.rows, choices.tokens, choices.places)
        )
        weight: Tensor = self.model.output_weight
        if choices.is_sparse:
            row, column = (tokens >= 0).nonzero(as_tuple=True)
            logits = hidden.new_full(tokens.shape, -torch.inf, dtype=torch.float32)
            for part in torch.arange(len(row), device=self.device).split(max(1, TILE_ELEMENTS // hidden.shape[1])):
                at, of = row[part], column[part]
                logits[at, of] = (hidden[rows[at]].float() * embed(tokens[at, of], weight, torch.float32)).sum(1)
            return logits
        if choices.head is not None:
            weight = embed(torch.from_numpy(choices.head).to(self.device), weight, self.dtype)
        return product(hidden[rows], weight).float().gather(1, places).masked_fill_(tokens < 0, -torch.inf)

    def drop(self, rows: Collection[int]) -> list[int]:
        """Take rows out whose answers are done; which one each of the others was, as the last ones take their places."""
        order = self.cache.drop(rows)
        self._prompts = [self._prompts[row] for row in order]
        return order


def _groups(lengths: Sequence[int]) -> Iterator[range]:
    """Part prompts, in their order, into runs of at most ENCODER_TOKENS tokens, or of one prompt."""
    first = tokens = 0
    for row, length in enumerate(lengths):
        if row > first and tokens + length > ENCODER_TOKENS:
            yield range(first, row)
            first, tokens = row, 0
        tokens += length
    yield range(first, len(lengths))


def _check_ids(model: T5, prompts: Sequence[Sequence[int]]) -> None:
    if any(len(ids) == 0 for ids in prompts):
        raise ValueError("each row needs at least one token (the end token)")
    vocab_size = model.config.vocab_size
    foreign = next((i for ids in prompts for i in ids if not 0 <= i < vocab_size), None)
    if foreign is not None:
        raise UserError(
            f"token id {foreign}, is outside of the model's vocabulary (0 to {vocab_size - 1}); "
            "use the tokenizer that the model was trained with"
        )
