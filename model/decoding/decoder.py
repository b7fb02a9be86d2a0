"""The decoder at work: prompts pass through the encoder once, then each step adds one token to every row that is being
answered.

One `Decoder` writes all answers: greedy, drawn, by beams, and of rows that come and go (continuous batching: Yu et al.
2022, Orca, OSDI). No answer depends on the rows beside it.

Shapes: n rows, G beams of each (1 without a search), N tokens, D d_model, H heads, K d_kv, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from devices.malloc import trim_malloc
from devices.sizes import ENCODER_TOKENS, LEAST_FILLED
from devices.threads import follow_machine
from model.decoding.answer_tree import Choices
from model.decoding.kv_cache import KVCache
from model.dropout import Dropout
from model.layers import residual_dtype
from model.quantization import embed, few_rows, product
from model.rows import Rows
from model.t5 import T5, Block, WithWeights, in_place
from settings.errors import UserError


class Decoder:
    """Rows that are being answered, their keys and values in `cache`.

    Args:
        model: in any mode; dropout is never applied.
        with_weights: a context around each use of a block, made of its weights (`engine.weights`).
        compute_dtype: what `with_weights` makes of the weights; None: the embedding's dtype.
        num_beams: G, answers of each prompt that are written side by side.
    Memory: that of `KVCache`; the encoder's activations of one block for at most ENCODER_TOKENS tokens, or for the
    longest
        prompt; logits of one step.
    """

    def __init__(
        self,
        model: T5,
        with_weights: WithWeights = in_place,
        compute_dtype: torch.dtype | None = None,
        num_beams: int = 1,
    ) -> None:
        self.model = model
        self.shape = model.config
        self.with_weights = with_weights
        self.dtype = compute_dtype or model.float_dtype
        self.device = model.embedding.device
        self.cache = KVCache(model, self.dtype, num_beams)
        self.blocks: list[Block] = list(model.decoder.blocks)  # type: ignore[arg-type]
        self._prompts: list[tuple[int, ...]] = []

    @torch.no_grad()
    def join(self, prompts: Sequence[Sequence[int]], limit: int) -> None:
        """Read more prompts, whose answers are written from the next step on; one that is being answered is not read
        again.

        Args:
            prompts: one list of token ids each, with its end token. limit: most tokens of an answer.
        Raises:
            UserError: an id outside of the vocabulary.
        """
        _check_ids(self.shape.vocab_size, prompts)
        follow_machine()
        first = len(self._prompts)
        rows: dict[tuple[int, ...], int] = {}  # The first row that has a prompt.
        sources = [rows.setdefault(ids, row) for row, ids in enumerate([*self._prompts, *map(tuple, prompts)])]
        try:
            self.cache.add(list(map(len, prompts)), limit)
            self._read({row: ids for ids, row in rows.items() if row >= first})
            for row, source in enumerate(sources):
                if row >= first and source != row:
                    self.cache.copy_source(source, row)
        except BaseException:
            self.cache.drop(range(first, first + len(prompts)))
            raise
        self._prompts += map(tuple, prompts)

    def _read(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Keys and values of prompts, by row, in groups that the encoder takes together."""
        for group in _groups({row: len(ids) for row, ids in prompts.items()}):
            rows = self.model.lay_out(tuple(len(prompts[row]) for row in group))
            padded = pad_sequence([torch.tensor(prompts[row]) for row in group], batch_first=True)
            encoded = self._encode(rows.flatten(padded), rows)
            for number, block in enumerate(self.blocks):
                cross = block.cross_attention
                with self.with_weights(block.parameters()):
                    keys, values = (cross.heads(matrix(encoded)) for matrix in (cross.k, cross.v))
                for row, start, length in zip(group, rows.starts, rows.lengths, strict=True):
                    part = slice(start, start + length)
                    self.cache.fill(number, row, keys[part], values[part])

    def _encode(self, ids: Tensor, rows: Rows) -> Tensor:
        """Encoder output (N, D). What malloc keeps of other lengths is given back before, and its own after."""
        self._trim()
        x = embed(ids.to(self.device), self.model.embedding, residual_dtype(self.dtype))
        # Products of fewer tokens would differ in their last bit with the number of threads
        # (`devices.threads.one_thread`).
        with few_rows() if len(ids) < LEAST_FILLED else nullcontext():
            output: Tensor = self.model.encoder(x, Dropout(0.0, rows), dtype=self.dtype, with_weights=self.with_weights)
        self._trim()
        return output

    def _trim(self) -> None:
        if self.device.type == "cpu":
            trim_malloc()

    @torch.no_grad()
    def step(self, ids: Sequence[int] | Tensor, choices: Choices | None = None) -> Tensor:
        """Append one token to the first g beams of each row: n g ids, those of a row side by side -> next logits (n g,
        V) fp32.

        Without beams a step that failed may be repeated.

        Args:
            choices: of k beams, from a list of answers: the logits are theirs, (k, W), -inf where there is no token.
        """
        follow_machine()
        logits = self._logits(ids, choices)
        self.cache.lengths = [length + 1 for length in self.cache.lengths]
        return logits

    def log_probs(self, ids: Sequence[int] | Tensor, choices: Choices | None = None) -> Tensor:
        """As `step`, log-probabilities; of a list of answers over the tokens that it allows."""
        return torch.log_softmax(self.step(ids, choices), 1)

    def _logits(self, ids: Sequence[int] | Tensor, choices: Choices | None) -> Tensor:
        self.cache.begin_step(len(ids) // len(self.cache.sources))
        x = embed(torch.as_tensor(ids, device=self.device), self.model.embedding, residual_dtype(self.dtype))
        no_drop = Dropout(0.0, Rows((1,) * len(ids)))
        with few_rows():
            for number, block in enumerate(self.blocks):
                attention = block.attention
                cross = block.cross_attention
                with self.with_weights(block.parameters()):
                    normed = block.attention_norm(x, self.dtype)
                    q, k, v = (attention.heads(matrix(normed)) for matrix in (attention.q, attention.k, attention.v))
                    x = x + attention.o(self.cache.attend_own(number, q, k, v))
                    q = cross.heads(cross.q(block.cross_norm(x, self.dtype)))
                    x = x + cross.o(self.cache.attend_source(number, q))
                    x = x + block.feed_forward(block.feed_forward_norm(x, self.dtype), no_drop)
            hidden = self.model.decoder.leave(x, no_drop).to(self.dtype)
            if choices is not None:
                return self._some(hidden, choices)
            return product(hidden, self.model.output_weight).float()

    def _some(self, hidden: Tensor, choices: Choices) -> Tensor:
        rows, tokens, columns = (
            torch.from_numpy(ids).to(self.device) for ids in (choices.rows, choices.tokens, choices.columns)
        )
        weight: Tensor = self.model.output_weight
        if choices.head is not None:
            weight = embed(torch.from_numpy(choices.head).to(self.device), weight, self.dtype)
        return product(hidden[rows], weight).float().gather(1, columns).masked_fill_(tokens < 0, -torch.inf)

    def drop(self, rows: Collection[int]) -> list[int]:
        """Take rows out whose answers are done; which one each of the others was, as the last ones take their
        places.
        """
        order = self.cache.drop(rows)
        self._prompts = [self._prompts[row] for row in order]
        return order

    def follow(self, parents: Tensor) -> None:
        """Let each beam continue from a beam of its prompt: parents (n, G) int64, numbers of beams."""
        self.cache.follow(parents)


def _groups(lengths: Mapping[int, int]) -> Iterator[list[int]]:
    """Part prompts, row -> length, into groups of at most ENCODER_TOKENS tokens, or of one prompt."""
    group = list[int]()
    tokens = 0
    for row, length in lengths.items():
        if group and tokens + length > ENCODER_TOKENS:
            yield group
            group = []
            tokens = 0
        group.append(row)
        tokens += length
    if group:
        yield group


def _check_ids(vocab_size: int, prompts: Sequence[Sequence[int]]) -> None:
    if not all(map(len, prompts)):
        raise ValueError("each row needs at least one token (the end token)")
    foreign = [i for i in set[int]().union(*prompts) if not 0 <= i < vocab_size]
    if foreign:
        raise UserError(
            "token id {foreign}, is outside of the model's vocabulary (0 to {vocab_size}); use the tokenizer "
            "that the model was trained with",
            foreign=min(foreign),
            vocab_size=vocab_size - 1,
        )
