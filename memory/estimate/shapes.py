"""The largest micro-batch and the largest step of a run, from the lengths of its rows.

Which rows a step sees is known before it runs, so its memory can be planned for what comes, not for a batch of nothing
but longest rows. Where a run has too many rows to look at all, a sample of its steps is taken, and what the sample
scatters is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from limits import LEAST_FILLED, LENGTH_MULTIPLE, filled_tokens

Row = tuple[int, int]  # encoder and decoder tokens
MicroBatchRows = tuple[Row, ...]  # the rows of a micro-batch
Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # of source and target tokens of a micro-batch, ascending
MOST_SIZES = 4  # of the token sums of micro-batches, on each side
FEW_FILLERS = 0.02  # share of the tokens that is not worth a further size
MOST_CANDIDATES = 128  # that they are chosen from
SCATTER = 2.0  # standard deviations between the largest step of a sample and the largest of all


Method = TypeVar("Method", bound=Callable[..., Any])


def remembered(method: Method) -> Method:
    """Let shapes keep what a method has found: a plan asks for few sizes, again and again."""

    @wraps(method)
    def found(self: Shapes, *asked: Any) -> Any:
        key = method.__name__, asked
        if key not in self._known:
            self._known[key] = method(self, *asked)
        return self._known[key]

    return cast(Method, found)


@dataclass(frozen=True)
class Tokens:
    """Encoder and decoder tokens of some rows together."""

    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Shapes:
    """Lengths of the rows of many steps, as one process sees them.

    Args:
        sources, targets: (S, R) whole numbers, tokens of row r of step s, in the order in which micro-batches are cut; a 0 is no row.
        is_complete: whether every step of the run is among them.
        max_tokens: most tokens of a micro-batch; None: any.
    """

    sources: NDArray[np.integer[Any]]
    targets: NDArray[np.integer[Any]]
    is_complete: bool = True
    max_tokens: int | None = None
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    _same: dict[Row, Row] = field(default_factory=dict, init=False, repr=False)  # a plan holds rows in hundreds of cuts

    @classmethod
    def longest(cls, rows: int, source: int, target: int, max_tokens: int | None = None) -> Shapes:
        """One step whose rows are all of the same length: what to plan for where the data is not known."""
        return cls(np.full((1, rows), source), np.full((1, rows), target), True, max_tokens)

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return int(self.sources.shape[1])

    @cached_property
    def longest_row(self) -> Tokens:
        """The longest encoder and the longest decoder input of any row."""
        return Tokens(int(self.sources.max()), int(self.targets.max()))

    @cached_property
    def step(self) -> Tokens:
        """Tokens of all rows of the largest step."""
        return Tokens(*(self._largest(part.sum(1), part, self.rows) for part in (self.sources, self.targets)))

    @remembered
    def sizes(self, batch_size: int) -> Sizes:
        """The few sizes that the token sums of micro-batches are filled up to with the fewest fillers."""
        largest = self.largest_micro_batch(batch_size)
        sums = [self._sums(part, batch_size) for part in (self.sources, self.targets)]
        source, target = (
            few_sizes(each[each > 0], most) if most else ()  # an encoder alone has no targets
            for each, most in zip(sums, (largest.source, largest.target), strict=True)
        )
        return source, target

    @remembered
    def largest_micro_batch(self, batch_size: int, sizes: Sizes | None = None) -> Tokens:
        """Tokens of the largest micro-batch of at most `batch_size` rows; filled up, where `sizes` are given."""
        found = [
            self._largest(self._sums(part, batch_size).max(1), part, batch_size)
            for part in (self.sources, self.targets)
        ]
        if self.max_tokens is not None:
            bounds = self.longest_row.source, self.longest_row.target
            found = [min(size, max(self.max_tokens, bound)) for size, bound in zip(found, bounds, strict=True)]
        return Tokens(*(found if sizes is None else map(filled_tokens, found, sizes)))

    def count(self, batch_size: int) -> int:
        """Micro-batches of the step that has the most of them; more than its rows alone ask for where tokens bound one."""
        return int(self._sums(self.sources, batch_size).shape[1])

    @remembered
    def together(self, batch_size: int, count: int, sizes: Sizes) -> Tokens:
        """Tokens of at most `count` micro-batches of one step, filled up; of all, where there are so many by their rows."""
        largest, is_all = self.largest_micro_batch(batch_size, sizes), count * batch_size >= self.rows
        found = []
        tokens, sides = (largest.source, largest.target), (self.sources, self.targets)
        for most, part, filled in zip(tokens, sides, sizes, strict=True):
            values, places = np.unique(self._sums(part, batch_size), return_inverse=True)
            values = np.array([filled_tokens(int(value), filled) if value else 0 for value in values])
            sums = values[places.reshape(part.shape[0], -1)]
            whole = self._largest(sums.sum(1), sums, sums.shape[1])
            found.append(whole if is_all else min(most * count, whole))
        return Tokens(*found)

    @remembered
    def padded_tokens(self, batch_size: int) -> int:
        """Tokens of the largest step whose rows are as long as the longest of their micro-batch (`data.batches.collate`)."""
        counts = self._of_groups(np.add, self.sources > 0, batch_size)
        found = 0
        for part in (self.sources, self.targets):
            longest = -(-self._of_groups(np.maximum, part, batch_size) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
            found += self._largest((counts * longest).sum(1), longest, self.rows)
        return found

    def _sums(self, part: NDArray[np.integer[Any]], batch_size: int) -> NDArray[np.int64]:
        return self._of_groups(np.add, part, batch_size)

    def _of_groups(self, join: np.ufunc, part: NDArray[Any], batch_size: int) -> NDArray[np.int64]:
        """(S, M): what numbers of the rows of each micro-batch come to, joined by their sum or maximum."""
        if self.max_tokens is None:
            found: NDArray[np.int64] = join.reduceat(part, np.arange(0, self.rows, batch_size), axis=1, dtype=np.int64)
            return found
        groups = self._micro_batch_of_rows(min(batch_size, self._most_rows))
        found = np.zeros((len(part), int(groups.max()) + 1), np.int64)
        places = (groups + found.shape[1] * np.arange(len(part))[:, None]).ravel()
        first = np.flatnonzero(np.diff(places, prepend=-1))  # of each micro-batch its first row
        found.flat[places[first]] = join.reduceat(part.ravel(), first, dtype=np.int64)
        return found

    @cached_property
    def _most_rows(self) -> int:
        """Rows of the micro-batch that has the most of them, where tokens alone bound one."""
        groups = self._micro_batch_of_rows(self.rows) + self.rows * np.arange(len(self.sources))[:, None]
        return int(np.bincount(groups[self.sources > 0]).max())

    def _micro_batch_of_rows(self, batch_size: int) -> NDArray[np.int64]:
        """(S, R): in which micro-batch of its step each row is, where tokens bound one; as the loader cuts a step. The last alone
        is remembered: it has 8 bytes a row, and a plan asks for many sizes."""
        last, kept = self._known.get("micro-batch of rows", (0, None))
        if last == batch_size:
            return kept  # type: ignore[no-any-return]
        found = self._known["micro-batch of rows"] = batch_size, self._cut_by_tokens(batch_size)
        return found[1]

    def _cut_by_tokens(self, batch_size: int) -> NDArray[np.int64]:
        group, rows, tokens = (np.zeros(len(self.sources), np.int64) for _ in range(3))
        found = np.zeros(self.sources.shape, np.int64)
        for place in range(self.rows):
            here = self.sources[:, place] > 0
            size = np.where(here, self.sources[:, place] + self.targets[:, place], 0)
            is_next = here & (rows > 0) & ((rows == batch_size) | (tokens + size > (self.max_tokens or 0)))
            group += is_next
            rows, tokens = np.where(is_next, 0, rows) + here, np.where(is_next, 0, tokens) + size
            found[:, place] = group
        return found

    def _largest(self, sums: NDArray[np.int64], part: NDArray[np.integer[Any]], rows: int) -> int:
        largest = int(sums.max())
        if self.is_complete:
            return largest
        return min(largest + int(SCATTER * float(sums.std())), int(part.max()) * rows)

    def worst_steps(self, batch_size: int, together: int = 1) -> list[list[MicroBatchRows]]:
        """The micro-batches of the step with the most tokens, of the one with the largest micro-batch, and with the largest pass.

        Args:
            together: micro-batches of a pass.
        """
        sums = self._sums(self.sources + self.targets, batch_size)
        passes = np.add.reduceat(sums, np.arange(0, sums.shape[1], together), axis=1)
        places = [int(most.argmax()) for most in (sums.sum(1), sums.max(1), passes.max(1))]
        return [self._cut(place, batch_size) for place in dict.fromkeys(places)]

    @remembered
    def widest_micro_batch(self, batch_size: int) -> MicroBatchRows:
        """The micro-batch with the most tokens of those of the worst steps."""
        micro_batches = chain.from_iterable(self.worst_steps(batch_size))
        return max(micro_batches, key=lambda lengths: sum(map(sum, lengths)))

    @remembered
    def _cut(self, place: int, batch_size: int) -> list[MicroBatchRows]:
        sides = zip(self.sources[place].tolist(), self.targets[place].tolist(), strict=True)
        rows = [self._same.setdefault(row, row) for row in sides if row[0]]
        if self.max_tokens is None:
            return [tuple(rows[first : first + batch_size]) for first in range(0, len(rows), batch_size)]
        groups = self._micro_batch_of_rows(min(batch_size, self._most_rows))[place, self.sources[place] > 0]
        numbered = groupby(zip(groups.tolist(), rows, strict=True), key=itemgetter(0))
        return [tuple(row for _, row in group) for _, group in numbered]


def few_sizes(sums: NDArray[np.int64], largest: int) -> tuple[int, ...]:
    """At most `MOST_SIZES` sizes, so that filling each sum up to the next one takes the fewest tokens in all; no more
    sizes than are worth it.

    Args:
        sums: tokens of micro-batches, any shape, at least one. largest: that may come; not below any of them.
    Returns:
        ascending; the sums themselves, at least 16, where they are so few, else multiples of 16, the last at least `largest`.
    """
    # Products of 5 to 11 rows differ in their last bit with the number of threads (MKL, fp32); those of 16 do not.
    values, counts = np.unique(np.maximum(np.append(sums, largest), LEAST_FILLED), return_counts=True)
    if len(values) <= MOST_SIZES:
        return tuple(values.tolist())
    step = LEAST_FILLED
    while len(edges := np.unique(-(-values // step) * step)) > MOST_CANDIDATES:
        step *= 2
    if len(edges) <= MOST_SIZES:
        return tuple(edges.tolist())
    up_to = np.searchsorted(values, edges, side="right")
    number, tokens = (np.cumsum(x)[up_to - 1] for x in (counts, counts * values))
    # fillers[i, j]: of all sums above edge i and up to edge j
    fillers = edges * (number - number[:, None]) - (tokens - tokens[:, None])
    fillers = np.where(np.arange(len(edges)) > np.arange(len(edges))[:, None], fillers, np.iinfo(np.int64).max // 2)
    least = edges * number - tokens  # of all sums up to an edge, by so many sizes of which it is the last
    before: list[NDArray[np.int64]] = []
    while len(before) < MOST_SIZES - 1 and least[-1] > FEW_FILLERS * tokens[-1]:
        ways = least[:, None] + fillers
        before.append(ways.argmin(0))
        least = np.minimum(ways.min(0), np.iinfo(np.int64).max // 2)
    found = [len(edges) - 1]
    for choice in reversed(before):
        found.append(int(choice[found[-1]]))
    return tuple(edges[found[::-1]].tolist())
