"""The largest micro-batch and the largest step of a run, from the lengths of its rows.

Which rows a step sees is known before it runs, so its memory can be planned for what comes, not for a batch of nothing
but longest rows. Where a run has too many rows to look at all, a sample of its steps is taken, and what the sample
scatters is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from devices.sizes import LEAST_FILLED, filled_tokens

RowLengths = tuple[int, int]  # Encoder and decoder tokens.
MicroBatchRows = tuple[RowLengths, ...]
Sizes = tuple[tuple[int, ...], tuple[int, ...]]  # Sizes of source and of target tokens of a micro-batch, ascending.
MOST_SIZES = 4  # Each side of micro-batches has at most so many sizes.
FEW_FILLERS = 0.02  # A share of the tokens for which no further size is added.
MOST_CANDIDATES = 128  # Sums that sizes are chosen from.
SCATTER = 2.0  # Standard deviations between the largest step of a sample and the largest of all.
FAR = np.iinfo(np.int64).max // 2

Method = TypeVar("Method", bound=Callable[..., Any])


def remembered(method: Method) -> Method:
    """Let shapes keep the results of a method: a plan asks for few sizes, again and again."""

    @wraps(method)
    def cached(self: Shapes, *arguments: Any) -> Any:
        key = (method.__name__, arguments)
        if key not in self._results:
            self._results[key] = method(self, *arguments)
        return self._results[key]

    return cast(Method, cached)


@dataclass(frozen=True)
class Tokens:
    """Encoder and decoder tokens of some rows together."""

    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Shapes:
    """Lengths of the rows of many steps, as one process sees them.

    Args:
        sources, targets: (S, R) whole numbers, tokens of row r of step s, in the order in which micro-batches are cut;
            0 is no row.
        is_complete: whether every step of the run is among them.
        max_tokens: most tokens of a micro-batch; None: any.
    """

    sources: NDArray[np.integer[Any]]
    targets: NDArray[np.integer[Any]]
    is_complete: bool = True
    max_tokens: int | None = None
    _results: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

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
        return Tokens(
            self._largest(self.sources.sum(1), self.sources, self.rows),
            self._largest(self.targets.sum(1), self.targets, self.rows),
        )

    @remembered
    def sizes(self, batch_size: int) -> Sizes:
        """The few sizes that the token sums of micro-batches are filled up to with the fewest fillers."""
        largest = self.largest_micro_batch(batch_size)
        sources = self._sums(self.sources, batch_size)
        targets = self._sums(self.targets, batch_size)
        of_targets = few_sizes(targets[targets > 0], largest.target) if largest.target else ()
        return few_sizes(sources[sources > 0], largest.source), of_targets

    @remembered
    def largest_micro_batch(self, batch_size: int, sizes: Sizes | None = None) -> Tokens:
        """Tokens of the largest micro-batch of at most `batch_size` rows; filled up, where `sizes` are given."""
        tokens = list[int]()
        for side in (self.sources, self.targets):
            largest = self._largest(self._sums(side, batch_size).max(1), side, batch_size)
            if self.max_tokens is not None:
                largest = min(largest, max(self.max_tokens, int(side.max())))
            tokens.append(largest)
        if sizes is not None:
            tokens = [filled_tokens(largest, filled) for largest, filled in zip(tokens, sizes, strict=True)]
        return Tokens(*tokens)

    def count(self, batch_size: int) -> int:
        """Micro-batches of the step that has the most of them; more than its rows alone ask for where tokens bound
        one.
        """
        return int(self._sums(self.sources, batch_size).shape[1])

    @remembered
    def together(self, batch_size: int, count: int, sizes: Sizes) -> Tokens:
        """Tokens of at most `count` micro-batches of one step, filled up."""
        largest = self.largest_micro_batch(batch_size, sizes)
        tokens = list[int]()
        sides = ((largest.source, self.sources, sizes[0]), (largest.target, self.targets, sizes[1]))
        for most, side, filled in sides:
            values, indices = np.unique(self._sums(side, batch_size), return_inverse=True)
            filled_values = np.array([filled_tokens(int(value), filled) if value else 0 for value in values])
            sums = filled_values[indices.reshape(side.shape[0], -1)]
            of_step = self._largest(sums.sum(1), sums, sums.shape[1])
            tokens.append(min(most * count, of_step))
        return Tokens(*tokens)

    def worst_steps(self, batch_size: int, together: int = 1) -> list[list[MicroBatchRows]]:
        """The micro-batches of the step with the most tokens, of the one with the largest micro-batch, and with the
        largest pass.

        Args:
            together: micro-batches of a pass.
        """
        sums = self._sums(self.sources + self.targets, batch_size)
        passes = np.add.reduceat(sums, np.arange(0, sums.shape[1], together), axis=1)
        steps = [int(most.argmax()) for most in (sums.sum(1), sums.max(1), passes.max(1))]
        return [self._micro_batches(step, batch_size) for step in dict.fromkeys(steps)]

    @remembered
    def widest_micro_batch(self, batch_size: int) -> MicroBatchRows:
        """The micro-batch with the most tokens of those of the worst steps."""
        micro_batches = [rows for step in self.worst_steps(batch_size) for rows in step]
        return max(micro_batches, key=lambda rows: sum(map(sum, rows)))

    def _largest(self, sums: NDArray[np.int64], side: NDArray[np.integer[Any]], rows: int) -> int:
        """The largest sum of any step, those that were not looked at included."""
        largest = int(sums.max())
        if self.is_complete:
            return largest
        return min(largest + int(SCATTER * float(sums.std())), int(side.max()) * rows)

    # --- How rows are cut into micro-batches

    def _sums(self, side: NDArray[np.integer[Any]], batch_size: int) -> NDArray[np.int64]:
        """(S, M): the tokens of each micro-batch."""
        if self.max_tokens is None:
            starts = np.arange(0, self.rows, batch_size)
            return np.add.reduceat(side, starts, axis=1, dtype=np.int64)
        numbers = self._micro_batch_of_rows(batch_size)
        width = int(numbers.max()) + 1
        indices = numbers + width * np.arange(len(side))[:, None]
        sums = np.bincount(indices.ravel(), side.ravel(), width * len(side))
        return sums.astype(np.int64).reshape(-1, width)

    def _micro_batch_of_rows(self, batch_size: int) -> NDArray[np.int64]:
        """(S, R): in which micro-batch of its step each row is, where tokens bound one; as the loader cuts a step.

        The last alone is remembered: it has 8 bytes a row, and a plan asks for many sizes.
        """
        batch_size = min(batch_size, self._most_rows)
        last_size, numbers = self._results.get("micro-batch of rows", (None, None))
        if last_size != batch_size:
            numbers = self._cut_by_tokens(batch_size)
            self._results["micro-batch of rows"] = (batch_size, numbers)
        return cast("NDArray[np.int64]", numbers)

    @cached_property
    def _most_rows(self) -> int:
        """Rows of the micro-batch that has the most of them, where tokens alone bound one: larger sizes are cut
        alike.
        """
        numbers = self._cut_by_tokens(self.rows) + self.rows * np.arange(len(self.sources))[:, None]
        return int(np.bincount(numbers[self.sources > 0]).max())

    def _cut_by_tokens(self, batch_size: int) -> NDArray[np.int64]:
        number = np.zeros(len(self.sources), np.int64)
        rows = np.zeros_like(number)
        tokens = np.zeros_like(number)
        numbers = np.zeros(self.sources.shape, np.int64)
        for index in range(self.rows):
            is_row = self.sources[:, index] > 0
            size = np.where(is_row, self.sources[:, index] + self.targets[:, index], 0)
            is_full = (rows == batch_size) | (tokens + size > (self.max_tokens or 0))
            starts_next = is_row & (rows > 0) & is_full
            number += starts_next
            rows = np.where(starts_next, 0, rows) + is_row
            tokens = np.where(starts_next, 0, tokens) + size
            numbers[:, index] = number
        return numbers

    def _micro_batches(self, step: int, batch_size: int) -> list[MicroBatchRows]:
        numbers = np.arange(self.rows) // batch_size
        if self.max_tokens is not None:
            numbers = self._micro_batch_of_rows(batch_size)[step]
        micro_batches = dict[int, list[RowLengths]]()
        lengths = zip(self.sources[step].tolist(), self.targets[step].tolist(), strict=True)
        for number, row in zip(numbers.tolist(), lengths, strict=True):
            if row[0]:
                # One tuple for all rows of these lengths: a plan keeps the rows of hundreds of micro-batches.
                micro_batches.setdefault(number, []).append(self._results.setdefault(row, row))
        return [tuple(rows) for rows in micro_batches.values()]


def few_sizes(sums: NDArray[np.int64], largest: int) -> tuple[int, ...]:
    """At most `MOST_SIZES` sizes, so that filling each sum up to the next one takes the fewest tokens in all.

    Args:
        sums: tokens of micro-batches, any shape, at least one. largest: that may come; not below any of them.
    Returns:
        ascending; the sums themselves, at least 16, where they are so few, else multiples of 16, the last at least
        `largest`.
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
    up_to = np.searchsorted(values, edges, side="right") - 1
    number = np.cumsum(counts)[up_to]
    tokens = np.cumsum(counts * values)[up_to]
    # fillers[i, j]: of all sums above edge i and up to edge j, filled up to edge j.
    fillers = edges * (number - number[:, None]) - (tokens - tokens[:, None])
    fillers = np.where(np.arange(len(edges)) > np.arange(len(edges))[:, None], fillers, FAR)
    fewest = edges * number - tokens  # Fillers of all sums up to an edge, if it is the last of the sizes.
    sizes_before = list[NDArray[np.int64]]()
    while len(sizes_before) < MOST_SIZES - 1 and fewest[-1] > FEW_FILLERS * tokens[-1]:
        with_one_more = fewest[:, None] + fillers
        sizes_before.append(with_one_more.argmin(0))
        fewest = np.minimum(with_one_more.min(0), FAR)
    chosen = [len(edges) - 1]
    for before in reversed(sizes_before):
        chosen.append(int(before[chosen[-1]]))
    return tuple(edges[chosen[::-1]].tolist())
