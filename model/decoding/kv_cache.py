"""KV cache: keys and values of the rows that are being answered, so that a step computes those of the newest tokens
alone.

Each decoder block has two buffers for the prompts and two for the answers, in which rows lie side by side, padded to
the longest; what lies beyond a row's own length is hidden. Rows may join at any step, behind the last one; where rows
leave, the last ones move into their places. All rows attend together, in a few operations whatever their number. On a
CPU a compiled kernel goes through each row's own length: its result is the same bits whatever rows are beside it.

Beams of a prompt share its keys and values. To reorder their own at every step would cost as much as the attention
itself, so nothing moves: every beam writes into its own slot, all beams of a prompt see all slots, and a mask leaves
each of them its ancestors.

Shapes: R rows, n of them answered, G beams of each (1 without a search), the first g of which go on, S longest source,
T longest answer so far (it doubles as it fills), H heads, K d_kv.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from devices.base import traits_of
from devices.kernels.calls import kernels_for
from devices.sizes import KERNEL_WIDTHS, few_places, filled_tokens
from model.t5 import T5

FIRST_CAPACITY = 64  # The first buffers of answers hold so many tokens.
Buffers = list[Tensor]  # Keys of the first block, its values, keys of the second block, ...


class KVCache:
    """The buffers of all decoder blocks, and how far each row has filled them.

    Args:
        dtype: of keys and values.
    Memory: decoder blocks x 2 x H x K x R x (S + G T) numbers; one of the buffers once more while it grows.
    """

    def __init__(self, model: T5, dtype: torch.dtype, num_beams: int) -> None:
        self._decoder = model.decoder
        self._device = model.embedding.device
        self._shape = model.config
        self.num_beams = num_beams
        self.dtype = dtype
        self.sources: list[int] = []  # Tokens of each row's prompt.
        self.limits: list[int] = []  # Most tokens of its answer.
        self.lengths: list[int] = []  # Tokens of its answer so far.
        self._source = self._empty()
        self._own = self._empty(num_beams)
        self._is_resized = False
        has_kernel = num_beams == 1 and self._shape.d_kv in KERNEL_WIDTHS
        self._kernels = kernels_for(self._source[0]) if has_kernel else None
        self._paths = torch.empty(0, num_beams, 0, dtype=torch.long, device=self._device)  # Ancestors' slots.

    def _empty(self, *beams: int) -> Buffers:
        size = (0, self._shape.num_heads, 0, *beams, self._shape.d_kv)
        count = 2 * self._shape.num_decoder_layers
        return [torch.empty(size, dtype=self.dtype, device=self._device) for _ in range(count)]

    def add(self, sources: Sequence[int], limit: int) -> None:
        """Room for more rows, with prompts of so many tokens and at most `limit` tokens of answers."""
        first = len(self.sources)
        least = max(self.limits, default=limit)
        self.sources += sources
        self.limits += [limit] * len(sources)
        self.lengths += [0] * len(sources)
        rows = len(self.sources)
        longest = max(self.sources)
        size = self._source[0].shape
        if rows > size[0] or longest > size[2] or limit > least:
            _resize(self._source, few_places(rows) if first else rows, longest, first)
            self._is_resized = True  # What earlier, longer rows have left goes with the next step.
        self._paths = self._paths.new_zeros(rows, self.num_beams, 0)

    def fill(self, block: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values (S, H, K) of a row's prompt."""
        for number, x in enumerate((keys, values), 2 * block):
            self._source[number][row, :, : len(x)] = x.transpose(0, 1)

    def copy_source(self, source: int, row: int) -> None:
        """A row has the prompt of row `source`."""
        for buffer in self._source:
            buffer[row, :, : self.sources[source]] = buffer[source, :, : self.sources[source]]

    def tokens_with(self, sources: Sequence[int] = (), limits: Sequence[int] = ()) -> int:
        """Tokens that there is room for once all answers have their longest length, were these rows here too."""
        longest_source = max((*self.sources, *sources), default=0)
        longest_answer = max((*self.limits, *limits), default=0)
        return few_places(len(self.sources) + len(sources)) * (longest_source + longest_answer)

    def drop(self, rows: Collection[int]) -> list[int]:
        """Take rows out; which one each of the others was."""
        if not rows:  # After most steps no answer ends.
            return list(range(len(self.sources)))
        count = len(self.sources) - len(rows)
        tail = iter([row for row in range(count, len(self.sources)) if row not in rows])
        order = [next(tail) if row in rows else row for row in range(count)]
        moved = [row for row, before in enumerate(order) if row != before]
        for buffer in (*self._source, *self._own) if moved else ():
            here = [row for row in moved if order[row] < len(buffer)]  # A row that has just joined has no answer yet.
            buffer[here] = buffer[[order[row] for row in here]]
        for numbers in (self.sources, self.limits, self.lengths):
            numbers[:] = [numbers[row] for row in order]
        self._paths = self._paths[order]
        if not order:
            self._source = self._empty()
            self._own = self._empty(self.num_beams)
        return order

    def follow(self, parents: Tensor) -> None:
        """Let each beam continue from a beam of its prompt: parents (n, G) int64, numbers of beams."""
        self._paths = self._paths.gather(1, parents.unsqueeze(2).expand(-1, -1, self._paths.shape[2]))

    def begin_step(self, beams: int) -> None:
        """Room for one more token of the first `beams` of each row, and what all blocks need to know of where it is."""
        rows = len(self.lengths)
        count = max(self.lengths) + 1
        if self._is_resized or count > self._own[0].shape[2]:
            capacity = max(FIRST_CAPACITY, 1 << (count - 1).bit_length())
            length = min(capacity, max(self.limits))
            _resize(self._own, len(self._source[0]), length, rows)
            self._is_resized = False
            self._make_biases(length)
        longest = self._own[0].shape[2]
        if self._kernels is not None:
            self._counts = np.array(self.lengths) + 1
            return
        device = self._device
        # Products have few sizes, as libraries keep something for each.
        self._visible = min(longest, filled_tokens(count))
        self._rows = torch.arange(rows, device=device)
        self._positions = torch.tensor(self.lengths, device=device)
        columns = torch.arange(longest - 1, longest - 1 + self._visible, device=device)
        self._distances = columns - self._positions[:, None]
        beyond = torch.arange(max(self.sources), device=device) >= torch.tensor(self.sources, device=device)[:, None]
        self._beyond = beyond[:, None, None]  # (n, 1, 1, S)
        self._foreign: Tensor | None = None
        if self.num_beams > 1:  # (n, 1, G, visible G): where a slot holds a token that is no ancestor of the beam.
            slots = torch.arange(self.num_beams, device=device)
            self._paths = torch.cat([self._paths, slots.expand(rows, -1).unsqueeze(2)], 2)
            foreign = (self._paths[:, :beams].unsqueeze(3) != slots).flatten(2)
            # The bias hides what is not written.
            self._foreign = F.pad(foreign, (0, (self._visible - count) * self.num_beams)).unsqueeze(1)

    def _make_biases(self, longest: int) -> None:
        """For each block the bias (H, 2 T - 1) of a token towards others, itself in the middle, then -inf; for a kernel
        until itself.
        """
        decoder = self._decoder
        makers = [decoder.bias] if decoder.bias is not None else [block.bias for block in decoder.blocks]
        biases = [maker.over_distances(longest) for maker in makers]  # type: ignore[operator,union-attr]
        if self._kernels is not None:
            biases = [bias[:, :longest].contiguous() for bias in biases]
        else:
            biases = [bias.to(self.dtype) for bias in biases]
        self._biases = biases * (self._shape.num_decoder_layers // len(biases))

    def attend_own(self, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one token a beam to those before it, which it joins: (n g, H, K) each -> (n g, H K)."""
        keys, values = (buffer[: len(self.lengths)] for buffer in self._own[2 * block : 2 * block + 2])
        bias = self._biases[block]
        if self._kernels is not None:
            return self._kernels.attend_newest(q, keys, values, self._counts, bias, (k, v)).flatten(1)
        for buffer, newest in ((keys, self._beams(k)), (values, self._beams(v))):
            buffer[self._rows, :, self._positions, : newest.shape[2]] = newest
        near = bias[:, self._distances].transpose(0, 1).unsqueeze(2).repeat_interleave(self.num_beams, 3)
        keys, values = (buffer[:, :, : self._visible].flatten(2, 3) for buffer in (keys, values))
        return _attend(self._beams(q), keys, values, near, self._foreign)

    def attend_source(self, block: int, q: Tensor) -> Tensor:
        """Attention of one token a beam to its source: q (n g, H, K) -> (n g, H K)."""
        part = slice(len(self.lengths)), slice(None), slice(max(self.sources))
        keys, values = (buffer[part] for buffer in self._source[2 * block : 2 * block + 2])
        if self._kernels is not None:
            return self._kernels.attend_newest(q, keys, values, np.array(self.sources)).flatten(1)
        return _attend(self._beams(q), keys, values, None, self._beyond)

    def _beams(self, x: Tensor) -> Tensor:
        """(n g, H, K) -> (n, H, g, K), a view."""
        return x.view(len(self.lengths), -1, *x.shape[1:]).transpose(1, 2)


def _resize(buffers: Buffers, rows: int, length: int, filled: int) -> None:
    """Give buffers so many rows and tokens of each, one after the other; the first `filled` rows keep theirs."""
    for number in range(len(buffers)):
        before = buffers[number]
        part = slice(min(filled, len(before))), slice(None), slice(min(length, before.shape[2]))
        buffers[number] = before.new_zeros(rows, before.shape[1], length, *before.shape[3:])
        buffers[number][part] = before[part]
        del before


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, hidden: Tensor | None) -> Tensor:
    """G queries a row: q (n, H, G, K), k and v (n, H, M, K) -> (n G, H K); as many rows at a time as the device forms
    scores.

    Args:
        bias: (n, H, 1, M), added to the scores. hidden: bool, broadcast to (n, H, G, M): where nothing is seen.
    """
    rows, heads, queries, width = q.shape
    out = q.new_empty(rows, queries, heads, width)
    at_once = max(1, traits_of(q.device).score_elements // (heads * queries * k.shape[2]))
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        scores = torch.matmul(q[part], k[part].transpose(2, 3))
        if bias is not None:
            scores += bias[part]
        if hidden is not None:
            scores.masked_fill_(hidden[part], float("-inf"))
        out[part] = torch.matmul(torch.softmax(scores, -1), v[part]).transpose(1, 2)
    return out.flatten(2).flatten(0, 1)
