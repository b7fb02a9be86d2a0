"""How does a model write? Token by token, the encoder run once, keys and values kept.

`Decoding` holds what one token needs of those before it: for each decoder block the keys and values of the encoder's
output (once) and of the tokens written so far (in buffers that double as they fill). `step` turns one token a row into
the next logits, `select` keeps, repeats or reorders rows. Whoever chooses tokens is outside: greedy and sampling here
take the logits of a step; a beam search would `select` its beams, a penalty would change the logits before the choice.

Shapes: B rows being written, S longest source, T buffer length, D d_model, H heads, K d_kv, V vocabulary.
Source: sampling from the best k: Fan et al. 2018; from the best p: Holtzman et al. 2020 (arXiv 1904.09751).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import PositionBias
from model.dropout import Dropout
from model.rows import Rows
from model.t5 import T5, DecoderBlock
from settings import UserError

Visit = Callable[[Iterable[nn.Parameter]], AbstractContextManager[object]]

FIRST_CAPACITY = 64  # tokens that the first buffers hold
HEAD_CHUNK_BYTES = 16 * 2**20  # most of the head that is held in another dtype at a time


def in_place(weights: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """The plain visit: weights are used where and as they are."""
    return nullcontext()


@dataclass
class _BlockCache:
    """Keys and values of one decoder block: of the source (B, H, S, K), and of the tokens so far (B, H, T, K)."""

    cross_k: Tensor
    cross_v: Tensor
    self_k: Tensor
    self_v: Tensor

    def grow(self, capacity: int) -> None:
        self.self_k, self.self_v = (_longer(buffer, capacity) for buffer in (self.self_k, self.self_v))

    def select(self, rows: Tensor) -> None:
        # one after the other, so that only one tensor is there twice
        self.cross_k = self.cross_k[rows]
        self.cross_v = self.cross_v[rows]
        self.self_k = self.self_k[rows]
        self.self_v = self.self_v[rows]


def _longer(buffer: Tensor, capacity: int) -> Tensor:
    longer = buffer.new_empty(*buffer.shape[:2], capacity, buffer.shape[3])
    longer[:, :, : buffer.shape[2]] = buffer
    return longer


class Decoding:
    """A batch of rows that are being written.

    Args:
        model: in any mode; dropout is never applied.
        input_ids: one list of token ids a row, with its end token; each at least one id.
        visit: is entered with the weights of a block around each use of that block.
        compute_dtype: what `visit` makes of the weights; None: the embedding's dtype.
    Memory: B x blocks x 2 x H x K x (S + T) numbers, and the encoder's activations of one block.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: T5,
        input_ids: Sequence[Sequence[int]],
        visit: Visit = in_place,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        _check(model, input_ids)
        self.model, self.visit = model, visit
        self.dtype, self.device = compute_dtype or model.embedding.dtype, model.embedding.device
        source = Rows(tuple(len(ids) for ids in input_ids))
        self.length, self.capacity = 0, FIRST_CAPACITY
        memory = self._encode(torch.tensor([i for ids in input_ids for i in ids], device=self.device), source)
        lengths = torch.tensor(source.lengths, device=self.device)
        beyond = torch.arange(source.longest, device=self.device) >= lengths[:, None]
        self.source_mask = torch.zeros_like(beyond, dtype=self.dtype).masked_fill_(beyond, float("-inf"))  # (B, S)
        self.caches = [self._fill(block, memory, source) for block in self._blocks]

    @property
    def _blocks(self) -> list[DecoderBlock]:
        return list(self.model.decoder.blocks)  # type: ignore[arg-type]

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.model.embedding).to(self.dtype)

    def _encode(self, ids: Tensor, rows: Rows) -> Tensor:
        """Encoder output (N, D) of ids (N,)."""
        stack, dropout = self.model.encoder, Dropout(0.0, rows)
        x = self._embed(ids)
        bias = None if stack.bias is None else stack.bias(rows.longest)
        for block in stack.blocks:
            with self.visit(block.parameters()):
                x = block(x, bias, rows, dropout)
        return stack.leave(x, dropout)

    def _fill(self, block: DecoderBlock, memory: Tensor, rows: Rows) -> _BlockCache:
        attention = block.cross_attention
        with self.visit(block.parameters()):
            k, v = (rows.pad(attention.heads(matrix(memory))).transpose(1, 2) for matrix in (attention.k, attention.v))
        empty = k.new_empty(k.shape[0], k.shape[1], self.capacity, k.shape[3])
        return _BlockCache(k.contiguous(), v.contiguous(), empty, torch.empty_like(empty))

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each row: ids (B,) int64 -> logits of the next (B, V), fp32."""
        if self.length == self.capacity:
            self.capacity *= 2
            for cache in self.caches:
                cache.grow(self.capacity)
        self.length += 1
        x, stack = self._embed(ids), self.model.decoder
        shared = None if stack.bias is None else self._bias(stack.bias)
        for block, cache in zip(self._blocks, self.caches, strict=True):
            with self.visit(block.parameters()):
                x = self._run(block, cache, x, shared if block.bias is None else self._bias(block.bias))
        return self._logits(stack.final_norm(x) * self.model.output_scale)

    def _bias(self, table: PositionBias) -> Tensor:
        """(H, 1, length): the bias of the newest token towards all so far."""
        return table(self.length)[:, None, : self.length].to(self.dtype)

    def _run(self, block: DecoderBlock, cache: _BlockCache, x: Tensor, bias: Tensor | None) -> Tensor:
        """One block for one token a row: x (B, D) -> (B, D)."""
        attention, cross = block.attention, block.cross_attention
        normed = block.attention_norm(x)
        cache.self_k[:, :, self.length - 1] = attention.heads(attention.k(normed))
        cache.self_v[:, :, self.length - 1] = attention.heads(attention.v(normed))
        k, v = cache.self_k[:, :, : self.length], cache.self_v[:, :, : self.length]
        x = x + attention.o(_attend(attention.heads(attention.q(normed)), k, v, bias))
        q = cross.heads(cross.q(block.cross_norm(x)))
        x = x + cross.o(_attend(q, cache.cross_k, cache.cross_v, self.source_mask[:, None, None]))
        return x + block.feed_forward(block.feed_forward_norm(x), Dropout(0.0, Rows((1,) * len(x))))

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.model.output_weight
        if head.dtype == self.dtype:
            return F.linear(hidden, head).float()
        rows = max(1, HEAD_CHUNK_BYTES // (head.shape[1] * hidden.element_size()))
        return torch.cat([F.linear(hidden, chunk.to(self.dtype)) for chunk in head.split(rows)], 1).float()

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (indices, int64), in this order; rows may be left out or repeated."""
        self.source_mask = self.source_mask[rows]
        for cache in self.caches:
            cache.select(rows)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """One query a row: q (B, H, K), k and v (B, H, M, K), bias broadcast to (B, H, 1, M) -> (B, H K)."""
    scores = torch.matmul(q.unsqueeze(2), k.transpose(2, 3))
    weights = torch.softmax(scores if bias is None else scores + bias, -1)
    return torch.matmul(weights, v).flatten(1)


def _check(model: T5, input_ids: Sequence[Sequence[int]]) -> None:
    if any(len(ids) == 0 for ids in input_ids):
        raise ValueError("input_ids: each row needs at least one token (the end token)")
    vocab_size = model.config.vocab_size
    foreign = next((i for ids in input_ids for i in ids if not 0 <= i < vocab_size), None)
    if foreign is not None:
        raise UserError(
            f"token id {foreign}, is outside of the model's vocabulary (0 to {vocab_size - 1}); "
            "use the tokenizer that the model was trained with"
        )


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen.

    Args:
        temperature: 0: the likeliest token; above: sampled from softmax(logits / temperature).
        top_k: sample from this many best tokens only; 0: from all.
        top_p: sample from the fewest best tokens that hold this probability, 0 (exclusive) to 1.
        seed: fixes the random numbers. Each row draws its own, from the seed and its input, so that its text does not
            depend on the rows beside it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def generator(self, ids: Sequence[int]) -> torch.Generator:
        """The random numbers of one row."""
        digest = hashlib.blake2b(repr((self.seed, list(ids))).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def __call__(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Choose one token a row: logits (B, V) fp32 -> (B,) int64."""
        if self.temperature == 0.0:
            return logits.argmax(1)
        count = min(self.top_k or logits.shape[1], logits.shape[1])
        best, tokens = logits.topk(count, 1)  # best first
        mass = torch.softmax((best - best[:, :1]) / self.temperature, 1).cumsum(1)
        # the tokens before which less than top_p has gathered; always the first
        kept = torch.cat([mass.new_zeros(len(mass), 1), mass[:, :-1]], 1) < self.top_p * mass[:, -1:]
        total = mass.gather(1, kept.sum(1, keepdim=True) - 1)
        draws = torch.stack([torch.rand(1, generator=generator) for generator in generators]).to(mass.device)
        place = torch.searchsorted(mass, draws * total, right=True).clamp_(max=count - 1)
        return tokens.gather(1, torch.minimum(place, kept.sum(1, keepdim=True) - 1)).squeeze(1)


def _write(
    decoding: Decoding, inputs: Sequence[Sequence[int]], choice: Choice, limit: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield (row, token) of all rows still being written, step by step; rows leave at their end token."""
    config, device = decoding.model.config, decoding.device
    alive = list(range(len(inputs)))
    generators = [choice.generator(ids) for ids in inputs]
    ids = torch.full((len(alive),), config.pad_token_id, device=device)  # T5 starts with padding
    for _ in range(limit):
        ids = choice(decoding.step(ids), generators)
        going = [place for place, token in enumerate(ids.tolist()) if token != config.eos_token_id]
        if len(going) < len(alive):
            alive, generators = [alive[place] for place in going], [generators[place] for place in going]
            if not alive:
                return
            places = torch.tensor(going, device=device)
            ids = ids[places]
            decoding.select(places)
        yield list(zip(alive, ids.tolist(), strict=True))


def generate(
    model: T5,
    input_ids: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    visit: Visit = in_place,
    compute_dtype: torch.dtype | None = None,
) -> list[list[int]]:
    """Write an answer to each row.

    Args:
        input_ids: one list of token ids a row, with its end token.
        max_new_tokens: longest answer, tokens, at least 1.
        temperature, top_k, top_p, seed: see `Choice`.
        visit, compute_dtype: see `Decoding`.
    Returns:
        token ids of each answer, without the start token and without the end token.
    Raises:
        UserError: an id outside of the vocabulary.
    Memory: see `Decoding`; T is at most twice the longest answer, or 64.
    """
    answers: list[list[int]] = [[] for _ in input_ids]
    if answers:
        decoding, choice = Decoding(model, input_ids, visit, compute_dtype), Choice(temperature, top_k, top_p, seed)
        for tokens in _write(decoding, input_ids, choice, max_new_tokens):
            for row, token in tokens:
                answers[row].append(token)
    return answers


def stream(
    model: T5,
    input_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    visit: Visit = in_place,
    compute_dtype: torch.dtype | None = None,
) -> Iterator[int]:
    """Yield the tokens of the answer to one row as they are chosen; the same tokens as `generate`, same arguments."""
    decoding, choice = Decoding(model, [input_ids], visit, compute_dtype), Choice(temperature, top_k, top_p, seed)
    for tokens in _write(decoding, [input_ids], choice, max_new_tokens):
        yield tokens[0][1]
