"""What does one token need of those before it? Keys and values, and which beam extends which.

For each decoder block: keys and values of the encoder's output, once for each prompt whatever the number of beams, and of
the tokens written so far, in buffers that double as they fill. `step` turns one token a beam into the next logits.
Beams that descend from each other would mean to reorder the buffers at every step, which costs as much as the attention
itself. Here nothing moves: every beam writes into its own slot, all beams of a prompt see all slots, and a mask leaves
each of them its ancestors. So `follow` changes a small table of numbers; only `select` (prompts that are done leave)
copies.

Shapes: B prompts being written, G beams of each (1 without a search), S longest source, T buffer length, D d_model,
H heads, K d_kv, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from devices.base import traits_of
from limits import ENCODER_TOKENS, filled_tokens
from model.attention import Attention
from model.decoding.passing import Passing, WithWeights, check_ids, in_place
from model.rows import Rows
from model.t5 import T5

FIRST_CAPACITY = 64  # tokens that the first buffers hold


@dataclass
class _BlockCache:
    """Keys and values of one decoder block: of the source (B, H, S, K), and of the tokens so far (B, H, T, G, K)."""

    cross_k: Tensor
    cross_v: Tensor
    self_k: Tensor
    self_v: Tensor

    def grow(self, capacity: int) -> None:
        self.self_k = _longer(self.self_k, capacity)
        self.self_v = _longer(self.self_v, capacity)

    def select(self, rows: Tensor) -> None:
        # one after the other, so that only one tensor is there twice
        self.cross_k = self.cross_k[rows]
        self.cross_v = self.cross_v[rows]
        self.self_k = self.self_k[rows]
        self.self_v = self.self_v[rows]


def _longer(buffer: Tensor, capacity: int) -> Tensor:
    longer = buffer.new_zeros(*buffer.shape[:2], capacity, *buffer.shape[3:])
    longer[:, :, : buffer.shape[2]] = buffer
    return longer


class Decoding:
    """A batch of prompts whose answers are being written.

    Args:
        model: in any mode; dropout is never applied.
        input_ids: one list of token ids a prompt, with its end token; each at least one id.
        with_weights: a context around each use of a block, made of its weights (`engine.weights`).
        compute_dtype: what `with_weights` makes of the weights; None: the embedding's dtype.
        num_beams: G, answers of each prompt that are written side by side.
        limit: most tokens that will be written, so that no buffer grows beyond it; None: unknown.
    Memory: decoder blocks x 2 x H x K x B x (S + G T) numbers, while a buffer doubles once more the old one; and the
        encoder's activations of one block for at most ENCODER_TOKENS tokens, or for the longest prompt.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: T5,
        input_ids: Sequence[Sequence[int]],
        with_weights: WithWeights = in_place,
        compute_dtype: torch.dtype | None = None,
        num_beams: int = 1,
        limit: int | None = None,
    ) -> None:
        check_ids(model, input_ids)
        self._passing = Passing(model, with_weights, compute_dtype)
        self.model, self.num_beams, self._limit = model, num_beams, limit
        self.dtype, self.device = self._passing.dtype, self._passing.device
        self.length, self.capacity = 0, min(FIRST_CAPACITY, limit or FIRST_CAPACITY)
        source = Rows(tuple(len(ids) for ids in input_ids))
        self.caches = [self._empty(block.attention, source) for block in self._passing.blocks]
        for first, last in _groups(source.lengths):
            part = Rows(source.lengths[first:last])
            ids = torch.tensor([i for row in input_ids[first:last] for i in row], device=self.device)
            self._fill(self._passing.encode(ids, part), part, first)
        for cache in self.caches:  # behind the encoder's pass, which they would stand beside
            cache.grow(self.capacity)
        lengths = torch.tensor(source.lengths, device=self.device)
        beyond = torch.arange(source.longest, device=self.device) >= lengths[:, None]
        self.source_mask = beyond[:, None, None] if len(set(source.lengths)) > 1 else None  # (B, 1, 1, S)
        self._slots = torch.arange(num_beams, device=self.device)
        self._paths = self._slots.new_zeros(len(source.lengths), num_beams, 0)  # (B, G, length): ancestors' slots
        self._biases = self._passing.biases(self.capacity)

    def _empty(self, attention: Attention, source: Rows) -> _BlockCache:
        rows, heads, width = len(source.lengths), attention.num_heads, attention.d_kv
        like = torch.empty(0, device=self.device, dtype=self.dtype)
        cross = [like.new_zeros(rows, heads, source.longest, width) for _ in range(2)]
        own = [like.new_empty(rows, heads, 0, self.num_beams, width) for _ in range(2)]
        return _BlockCache(*cross, *own)

    def _fill(self, encoder_output: Tensor, rows: Rows, first: int) -> None:
        """Keys and values of some prompts' encoder output (N, D), for prompts from `first` on."""
        for cache, (keys, values) in zip(self.caches, self._passing.sources(encoder_output), strict=True):
            for flat, place in ((keys, cache.cross_k), (values, cache.cross_v)):
                for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True), first):
                    place[row, :, :length] = flat[start : start + length].transpose(0, 1)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each beam: ids (B G,) int64, beams of a prompt side by side -> next logits (B G, V) fp32."""
        if self.length == self.capacity:
            self.capacity = 2 * self.capacity if self._limit is None else min(2 * self.capacity, self._limit)
            for cache in self.caches:
                cache.grow(self.capacity)
            self._passing.trim()
            self._biases = self._passing.biases(self.capacity)
        self.length += 1
        seen = min(
            self.capacity, filled_tokens(self.length)
        )  # few sizes of products, as libraries keep something for each
        foreign = self._foreign(seen) if self.num_beams > 1 else None
        reach = slice(self.capacity - self.length, self.capacity - self.length + seen)
        ways = [
            (partial(self._attend_own, cache, bias[:, reach], foreign), partial(self._attend_source, cache))
            for cache, bias in zip(self.caches, self._biases, strict=True)
        ]
        return self._passing.step(ids, ways)

    def _foreign(self, seen: int) -> Tensor:
        """(B, 1, G, seen G) bool: where a slot holds a token that is no ancestor of the beam; each has its own newest token."""
        rows = len(self._paths)
        newest = self._slots.expand(rows, -1).unsqueeze(2)
        self._paths = torch.cat([self._paths, newest], 2)
        foreign = (self._paths.unsqueeze(3) != self._slots).flatten(2)  # (B, G, length G)
        return F.pad(foreign, (0, (seen - self.length) * self.num_beams)).unsqueeze(
            1
        )  # the bias hides what is not written

    def _attend_own(
        self, cache: _BlockCache, bias: Tensor, foreign: Tensor | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attention of one token a beam to those before it, which it joins: (B G, H, K) each -> (B G, H K).

        Args:
            bias: (H, seen), -inf towards places that are not written.
        """
        cache.self_k[:, :, self.length - 1] = self._beams(k)
        cache.self_v[:, :, self.length - 1] = self._beams(v)
        keys, values = (buffer[:, :, : bias.shape[1]].flatten(2, 3) for buffer in (cache.self_k, cache.self_v))
        return _attend(self._beams(q), keys, values, bias.repeat_interleave(self.num_beams, 1), foreign)

    def _attend_source(self, cache: _BlockCache, q: Tensor) -> Tensor:
        """Attention of one token a beam to its source: q (B G, H, K) -> (B G, H K)."""
        return _attend(self._beams(q), cache.cross_k, cache.cross_v, None, self.source_mask)

    def _beams(self, x: Tensor) -> Tensor:
        """(B G, H, K) -> (B, H, G, K), a view."""
        return x.view(-1, self.num_beams, *x.shape[1:]).transpose(1, 2)

    def follow(self, parents: Tensor) -> None:
        """Let each beam continue from a beam of its prompt: parents (B, G) int64, numbers of beams."""
        self._paths = self._paths.gather(1, parents.unsqueeze(2).expand(-1, -1, self.length))

    def select(self, rows: Tensor) -> None:
        """Continue with these prompts (indices, int64), in this order; prompts may be left out or repeated."""
        self._paths = self._paths[rows]
        self.source_mask = None if self.source_mask is None else self.source_mask[rows]
        for cache in self.caches:
            cache.select(rows)


def _groups(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Part prompts, in their order, into runs of at most ENCODER_TOKENS tokens, or of one prompt."""
    first = tokens = 0
    for row, length in enumerate(lengths):
        if row > first and tokens + length > ENCODER_TOKENS:
            yield first, row
            first, tokens = row, 0
        tokens += length
    yield first, len(lengths)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, blank: Tensor | None) -> Tensor:
    """G queries a prompt: q (B, H, G, K), k and v (B, H, M, K) -> (B G, H K), in tiles of the scores.

    Args:
        bias: (H, M), added to the scores. blank: bool, broadcast to (B, H, G, M): where nothing is seen.
    """
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])  # (B, G, H, K)
    for rows, heads, queries in _tiles(q.shape[0], q.shape[1], q.shape[2], k.shape[2], traits_of(q.device).scores):
        scores = torch.matmul(q[rows, heads, queries], k[rows, heads].transpose(2, 3))
        if bias is not None:
            scores.add_(bias[heads].unsqueeze(1))
        if blank is not None:
            scores.masked_fill_(blank[rows, :, queries if blank.shape[2] > 1 else slice(None)], float("-inf"))
        out[rows, queries, heads] = torch.matmul(torch.softmax(scores, -1), v[rows, heads]).transpose(1, 2)
    return out.flatten(2).flatten(0, 1)


def _tiles(rows: int, heads: int, queries: int, keys: int, scores: int) -> Iterator[tuple[slice, slice, slice]]:
    """Parts of so many scores at most, or of one query: as many queries as go, of as many heads, of as many rows."""
    steps, left = [], scores // keys
    for count in (queries, heads, rows):
        steps.append(max(1, min(count, left)))
        left //= count
    for row in range(0, rows, steps[2]):
        for head in range(0, heads, steps[1]):
            for query in range(0, queries, steps[0]):
                yield slice(row, row + steps[2]), slice(head, head + steps[1]), slice(query, query + steps[0])
