"""What does attention work with on a GPU (`model.padded_attention`)? Padded copies of its rows, and the scores of a group.

Counted from the same groups of rows that the model forms (`limits.wide_groups`). Bytes, for one attention.

Shapes: H heads, I = H K inner width, L and M padded queries and keys of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from limits import RowGroup, wide_groups

HASH_BYTES = 4  # of dropout's random words, for each score, while they are drawn
INDEX_BYTES = 4


@dataclass(frozen=True)
class Padded:
    """One attention over padded rows.

    Args:
        heads: H. width: bytes of I numbers. e: of one. drops: whether weights are dropped. is_fused: torch's fused kernel
            computes. has_bias: whether there is a bias over distances, whose gradient is formed.
        queries, keys: lengths of the rows. scores: that are formed at a time.
    """

    heads: int
    width: int
    e: int
    drops: bool
    is_fused: bool
    has_bias: bool
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    scores: int

    @property
    def groups(self) -> tuple[RowGroup, ...]:
        """As the model forms them."""
        return _groups(self.queries, self.keys, self.heads, self.scores)

    def _is_whole(self, is_keys: bool) -> bool:
        """Whether the padded rows are the rows as they lie."""
        lengths = self.keys if is_keys else self.queries
        sizes = {group.num_keys if is_keys else group.num_queries for group in self.groups}
        exact = all(group.places == len(group.rows) for group in self.groups)
        return exact and sizes == set(lengths) and len(sizes) == 1

    def _places(self, is_keys: bool) -> tuple[int, int]:
        """Padded tokens of the largest group that are copied, and of all groups."""
        each = [group.places * (group.num_keys if is_keys else group.num_queries) for group in self.groups]
        copied = 0 if self.is_fused and self._is_whole(is_keys) else max(each)
        return copied, sum(each)

    @property
    def _largest(self) -> int:
        """Scores of the largest piece."""
        return max(self.heads * group.places * group.block * group.num_keys for group in self.groups)

    @property
    def _mask(self) -> int:
        """What is added to the scores of a group, where it is made for each row: a bias, and rows of unequal length."""
        is_uneven = not self._is_whole(is_keys=True)
        return self._largest * self.e if self.is_fused and self.has_bias and is_uneven else 0

    @property
    def bias_matrix(self) -> int:
        """The bias of one stack as a matrix, for each size of a group."""
        sizes = {(group.num_queries, group.num_keys) for group in self.groups}
        return self.heads * self.e * sum(queries * keys for queries, keys in sizes) if self.has_bias else 0

    def indices(self) -> int:
        """Where rows and tokens lie, once for all layers."""
        total = 0
        for is_keys, lengths in ((False, self.queries), (True, self.keys)):
            if not self._is_whole(is_keys):
                total += INDEX_BYTES * (self.heads + 1) * (self._places(is_keys)[1] + sum(lengths))
        return total

    def forward(self) -> int:
        """At its highest, the result among it."""
        (queries, all_queries), (keys, _) = self._places(False), self._places(True)
        gathered, out = (queries + 2 * keys) * self.width, all_queries * self.width
        if self.is_fused:
            return max(gathered + self._mask + out, self._collected(all_queries, self.queries, False))
        each = max(2 * self.e, self.e + HASH_BYTES if self.drops else 0, 2 * self.e + 1 if self.drops else 0)
        return max(gathered + self._largest * each + out, self._collected(all_queries, self.queries, True))

    def _collected(self, places: int, lengths: Sequence[int], is_by_head: bool) -> int:
        """While padded results are laid end to end: they, a copy of all, and the tokens."""
        if self._is_whole(lengths is self.keys):
            return (2 if is_by_head else 1) * places * self.width
        return (2 * places + sum(lengths)) * self.width

    def backward(self) -> int:
        """At its highest, the gradients of q, k and v among it."""
        (queries, all_queries), (keys, all_keys) = self._places(False), self._places(True)
        copied = (2 * queries + 2 * keys) * self.width
        results = (all_queries + 2 * all_keys) * self.width
        if self.is_fused:
            out = max(group.places * group.num_queries for group in self.groups) * self.width
            scores = self._mask + (self._largest * self.e if self.has_bias else 0) + out
        else:
            scores = self._largest * (max(3 * self.e + 1, self.e + HASH_BYTES) if self.drops else 3 * self.e)
        return copied + max(scores + results, self._distances() + results)

    def _distances(self) -> int:
        """The gradient of a bias as it is summed over equal distances, in fp32: a matrix, and a copy with room."""
        if not self.has_bias:
            return 0
        sizes = [(group.block, group.num_keys) for group in self.groups]
        return max(4 * self.heads * (n * m + n * (n + m + 1)) for n, m in sizes)


@lru_cache(maxsize=256)
def _groups(queries: tuple[int, ...], keys: tuple[int, ...], heads: int, scores: int) -> tuple[RowGroup, ...]:
    return tuple(wide_groups(queries, keys, heads, scores))
