"""What attention by torch's operations works with (`model.padded_attention`): padded copies of its rows, and the scores of a group.

Counted from the same groups of rows that the model forms (`limits.row_groups`). Bytes, for one attention.

Shapes: H heads, I = H K inner width, L and M padded queries and keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from limits import RowGroup, fuses_backward, row_groups

HASH_BYTES = 4  # of dropout's random words, for each element, while they are drawn
INDEX_BYTES = 4


@dataclass(frozen=True)
class Padded:
    """One attention over padded rows.

    Args:
        heads: H. width: bytes of I numbers. e: of one. drops: whether a mask of the weights is drawn. is_fused: torch's fused kernel
            computes. has_bias: whether there is a bias over distances, whose gradient is formed.
        queries, keys: lengths of the rows. scores: that are formed at a time. processors: of a GPU; 0: not known.
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
    processors: int = 0

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

    def _places(self, is_keys: bool) -> int:
        return sum(group.places * (group.num_keys if is_keys else group.num_queries) for group in self.groups)

    def indices(self) -> int:
        """Where rows and tokens lie, once for all layers."""
        total = 0
        for is_keys, lengths in ((False, self.queries), (True, self.keys)):
            if not self._is_whole(is_keys):
                total += INDEX_BYTES * (self._places(is_keys) + sum(lengths))
        return total

    def forward(self) -> int:
        """At its highest, the result among it."""
        room = self._places(False) * self.width
        each = 0 if self.is_fused else max(2 * self.e + self.drops, self.e + HASH_BYTES if self.drops else 0)
        at_work = (
            self._copied(group, 1) + self._scores_of(group) * each + self._mask_of(group) for group in self.groups
        )
        return room + max(*at_work, self._collected(self._places(False), sum(self.queries)))

    def backward(self) -> int:
        """At its highest, the gradients of q, k and v among it."""
        groups = [(group.places, self.heads, group.num_queries, group.num_keys) for group in self.groups]
        if self.is_fused and not any(fuses_backward(*group, self.processors) for group in groups):
            return replace(self, is_fused=False).backward()
        places, tokens = self._places(False) + 2 * self._places(True), sum(self.queries) + 2 * sum(self.keys)
        at_work = (self._copied(group, 2) + max(self._at_work(group), self._distances(group)) for group in self.groups)
        return places * self.width + max(*at_work, self._collected(places, tokens))

    def _at_work(self, group: RowGroup) -> int:
        """The scores of a group in backward, in all forms that are there together."""
        scores = self._scores_of(group)
        if self.is_fused:
            out = group.places * group.num_queries * self.width
            return self._mask_of(group) + (scores * self.e if self.has_bias else 0) + out
        of_values = group.places * group.num_keys * self.width  # their gradient is formed first
        return of_values + scores * (max(3 * self.e + 1, self.e + HASH_BYTES) if self.drops else 3 * self.e)

    def _copied(self, group: RowGroup, of_queries: int) -> int:
        """Padded copies of queries (and of the gradient of their results), keys and values."""
        queries = 0 if self.is_fused and self._is_whole(is_keys=False) else of_queries * group.num_queries
        keys = 0 if self.is_fused and self._is_whole(is_keys=True) else 2 * group.num_keys
        return group.places * (queries + keys) * self.width

    def _scores_of(self, group: RowGroup) -> int:
        return self.heads * group.places * group.block * group.num_keys

    def _mask_of(self, group: RowGroup) -> int:
        """What is added to the scores of the fused kernel: a bias, for each row where rows are of unequal length."""
        if not (self.is_fused and self.has_bias):
            return 0
        return self._scores_of(group) * self.e // (group.places if self._is_whole(is_keys=True) else 1)

    def _collected(self, places: int, tokens: int) -> int:
        """A copy of the results: of those of all groups, end to end, or of the tokens among them; none where they are as they lie."""
        is_joined = self.is_fused and len(self.groups) > 1 and all(g.block == g.num_queries for g in self.groups)
        return max(places if is_joined else 0, 0 if self._is_whole(is_keys=False) else tokens) * self.width

    def _distances(self, group: RowGroup) -> int:
        """The gradient of a bias as it is summed over equal distances, in fp32: a matrix, and a copy with room."""
        n, m = group.block, group.num_keys
        return 4 * self.heads * (n * m + n * (n + m + 1)) if self.has_bias else 0


@lru_cache(maxsize=256)
def _groups(queries: tuple[int, ...], keys: tuple[int, ...], heads: int, scores: int) -> tuple[RowGroup, ...]:
    return tuple(row_groups(queries, keys, heads, scores))
