"""How do rows join and leave a batch while it is being written? Each row brings its own keys and values.

A step takes one token of every row together through norms, products and feed-forward, where reading the weights is what
costs; attention goes row by row, over exactly the tokens that the row has. So nothing is padded, moved or masked when rows
come and go, a row takes what its own lengths take, and its attention is the very computation that it would be alone.

Shapes: M rows, L decoder blocks, S source tokens of a row, T most tokens of its answer, H heads, K d_kv, V vocabulary.
Source: continuous batching: Yu et al. 2022 (Orca, OSDI), selective batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from devices.kernels.calls import Kernels, Seen, kernels, takes
from limits import KERNEL_WIDTHS
from model.decoding.passing import Passing, WithWeights, check_ids, in_place
from model.rows import Rows
from model.t5 import T5


@dataclass
class RunningRow:
    """One answer that is being written.

    Args:
        source: keys and values of the prompt (2, L, H, S, K); rows with the same prompt may share it.
        own: of the tokens written so far (2, L, H, T, K).
    """

    source: Tensor
    own: Tensor
    length: int = 0


class RunningBatch:
    """Writes rows that come and go.

    Args:
        longest: most tokens of an answer.
        model, with_weights, compute_dtype: see `Passing`.
    Memory: 2 L H K (S + T) numbers a row; the encoder's activations of one prompt; logits of M rows.
    """

    def __init__(
        self, model: T5, longest: int, with_weights: WithWeights = in_place, compute_dtype: torch.dtype | None = None
    ) -> None:
        self._passing, self._longest = Passing(model, with_weights, compute_dtype), longest
        self._biases = [bias[:, :longest].float().contiguous() for bias in self._passing.biases(longest)]
        self.device = self._passing.device

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Keys and values (2, L, H, S, K) of one prompt, with its end token.

        Raises:
            UserError: an id outside of the vocabulary.
        """
        passing = self._passing
        check_ids(passing.model, [ids])
        output = passing.encode(torch.tensor(ids, device=self.device), Rows((len(ids),)))
        source: Tensor | None = None
        for place, both in enumerate(passing.sources(output)):
            if source is None:
                source = both[0].new_empty(2, len(passing.blocks), both[0].shape[1], len(ids), both[0].shape[2])
            for kind, flat in enumerate(both):
                source[kind, place] = flat.transpose(0, 1)
        assert source is not None
        return source

    def begin(self, source: Tensor, limit: int) -> RunningRow:
        """A row that answers a prompt with at most `limit` tokens."""
        assert limit <= self._longest
        shape = (*source.shape[:3], limit, source.shape[4])
        return RunningRow(source, source.new_empty(shape))

    @torch.no_grad()
    def step(self, rows: Sequence[RunningRow], ids: Sequence[int]) -> Tensor:
        """One more token of each row -> next logits (M, V) fp32. A step that failed may be repeated.

        Args:
            ids: the newest token of each row; of a new row the start token.
        """
        ways = [
            (partial(self._attend_own, rows, place), partial(self._attend_source, rows, place))
            for place in range(len(self._biases))
        ]
        logits = self._passing.step(torch.tensor(ids, device=self.device), ways)
        for row in rows:
            row.length += 1
        return logits

    def _attend_own(self, rows: Sequence[RunningRow], place: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self._biases[place]
        if (compiled := self._kernels(q, k, v)) is not None:
            seen = _seen([(row.own, row.length + 1) for row in rows], place)
            return compiled.attend_newest(q, seen, bias, (k, v)).flatten(1)
        out = torch.empty_like(q)
        for number, row in enumerate(rows):
            keys, values = row.own[0, place], row.own[1, place]  # (H, T, K)
            keys[:, row.length], values[:, row.length] = k[number], v[number]
            near = bias[:, self._longest - row.length - 1 :]
            out[number] = _attend_row(q[number], keys[:, : row.length + 1], values[:, : row.length + 1], near)
        return out.flatten(1)

    def _attend_source(self, rows: Sequence[RunningRow], place: int, q: Tensor) -> Tensor:
        if (compiled := self._kernels(q)) is not None:
            seen = _seen([(row.source, row.source.shape[3]) for row in rows], place)
            return compiled.attend_newest(q, seen, None).flatten(1)
        out = torch.empty_like(q)
        for number, row in enumerate(rows):
            out[number] = _attend_row(q[number], row.source[0, place], row.source[1, place], None)
        return out.flatten(1)

    def _kernels(self, *tensors: Tensor) -> Kernels | None:
        return kernels() if tensors[0].shape[2] in KERNEL_WIDTHS and takes(*tensors) else None


def _seen(caches: Sequence[tuple[Tensor, int]], place: int) -> Array[Seen]:
    """Of each cache (2, L, H, n, K) the keys and values of one block, so many of them, as kernels read them."""
    rows = []
    for cache, count in caches:
        kind, block = (cache.stride(dimension) * cache.element_size() for dimension in (0, 1))
        keys = cache.data_ptr() + place * block
        rows.append(Seen(keys, keys + kind, count, cache.shape[3]))
    return (Seen * len(rows))(*rows)


def _attend_row(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """One token: q (H, K), keys and values (H, n, K), bias (H, n) fp32 -> (H, K)."""
    scores = torch.matmul(keys, q.unsqueeze(2)).squeeze(2)
    weights = torch.softmax(scores if bias is None else scores.add_(bias), -1)
    return torch.matmul(weights.unsqueeze(1), values).squeeze(1)
