"""The worst batches, from the lengths of rows."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.batches.collate import Row, collate
from data.batches.loader import filled
from limits import filled_tokens
from memory.cost.shapes import Shapes, Tokens, few_sizes
from memory.cost.speed import Amount

SOURCES = np.array([[2, 3, 9, 10], [4, 4, 4, 8]])
TARGETS = np.array([[1, 1, 2, 5], [7, 1, 1, 0]])


def test_the_largest_micro_batch_and_step() -> None:
    shapes = Shapes(SOURCES, TARGETS)
    assert shapes.largest_micro_batch(1) == Tokens(10, 7)
    assert shapes.largest_micro_batch(2) == Tokens(19, 8)
    assert shapes.largest_micro_batch(4) == shapes.step == Tokens(24, 9)
    assert shapes.longest_row == Tokens(10, 7)


def test_what_was_found_is_kept_by_the_shapes_it_belongs_to() -> None:
    first, second = Shapes(SOURCES, TARGETS), Shapes(SOURCES + 1, TARGETS)
    assert first.largest_micro_batch(2) is first.largest_micro_batch(2) and first.largest_micro_batch(
        2
    ) != second.largest_micro_batch(2)
    found = first.widest_micro_batch(1)
    for batch_size in range(1, 200):  # as many sizes as one likes
        first.largest_micro_batch(batch_size)
    assert first.widest_micro_batch(1) is found
    known = weakref.ref(first)
    del first
    gc.collect()
    assert known() is None


def test_micro_batches_together_are_filled_up_each_and_empty_ones_are_not() -> None:
    shapes = Shapes(np.array([[2, 3, 9, 10], [4, 4, 0, 0]]), np.array([[1, 1, 2, 5], [7, 1, 0, 0]]))
    sizes = (16, 32), (8, 16)
    assert shapes.largest_micro_batch(2, sizes) == Tokens(32, 8)
    assert shapes.together(2, 2, sizes) == Tokens(16 + 32, 8 + 8)
    assert shapes.together(2, 1, sizes) == Tokens(32, 8)
    alone = Shapes(np.array([[4, 4, 0, 0]]), np.array([[7, 1, 0, 0]]))
    assert alone.together(2, 2, sizes) == Tokens(16, 8), "two rows of four are no rows"


def test_no_room_is_kept_for_micro_batches_without_rows() -> None:
    shapes = Shapes(np.array([[2, 3, 9, 10], [4, 4, 0, 0]]), np.array([[1, 1, 2, 5], [7, 1, 0, 0]]))
    assert shapes.sizes(2) == ((5, 8, 19), (2, 7, 8))


def test_the_largest_micro_batch_may_lie_in_a_smaller_step() -> None:
    shapes = Shapes(np.array([[5, 5, 5, 5], [1, 1, 1, 12]]), np.array([[1, 1, 1, 1], [1, 1, 1, 1]]))
    assert [len(step) for step in shapes.worst_steps(1)] == [4, 4] and ((12, 1),) in shapes.worst_steps(1)[1]
    assert shapes.widest_micro_batch(1) == ((12, 1),)
    assert len(shapes.worst_steps(4)) == 1


def test_the_largest_pass_may_lie_in_neither() -> None:
    shapes = Shapes(np.array([[6, 6, 6, 6], [10, 10, 1, 1], [12, 1, 1, 1]]), np.ones((3, 4), int))
    assert [step[0] for step in shapes.worst_steps(1, 2)] == [((6, 1),), ((12, 1),), ((10, 1),)]


@pytest.mark.parametrize("most", [500, 2000, 100_000])
@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_a_bound_of_tokens_is_priced_as_the_loader_cuts(most: int, batch_size: int) -> None:
    draw = np.random.default_rng(0)
    sources, targets = draw.integers(20, 500, (9, 64)), draw.integers(10, 114, (9, 64))
    sources[4, 50:], targets[4, 50:] = 0, 0  # the last step of an epoch
    shapes = Shapes(sources, targets, max_tokens=most)
    sizes, seen = shapes.sizes(batch_size), []
    for step in zip(sources, targets, strict=True):
        rows: list[Any] = [SimpleNamespace(lengths=pair) for pair in np.stack(step, 1)[step[0] > 0]]
        sums = np.array([sum(row.lengths for row in group) for group in filled(rows, batch_size, most)])
        seen.append([[filled_tokens(int(size), up_to) for size in sums[:, side]] for side, up_to in enumerate(sizes)])
    held = Tokens(*(max(sum(step[side]) for step in seen) for side in (0, 1)))
    assert shapes.count(batch_size) == max(len(step[0]) for step in seen)
    assert shapes.together(batch_size, shapes.count(batch_size), sizes) == held
    assert shapes.largest_micro_batch(batch_size, sizes) == Tokens(
        *(max(map(max, side)) for side in zip(*seen, strict=True))
    )
    parts = shapes.together(batch_size, 2, sizes)
    of_two = (
        max(sum(step[side][at : at + 2]) for step in seen for at in range(0, len(step[side]), 2)) for side in (0, 1)
    )
    assert all(ours >= theirs for ours, theirs in zip((parts.source, parts.target), of_two, strict=True))


def test_rows_as_the_loader_cuts_them() -> None:
    shapes = Shapes(SOURCES, TARGETS, max_tokens=14)
    assert shapes.worst_steps(2) == [[((2, 1), (3, 1)), ((9, 2),), ((10, 5),)]]
    assert shapes.largest_micro_batch(4).source <= 14


def test_a_sample_of_the_steps_leaves_room_for_the_others() -> None:
    draw = np.random.default_rng(0)
    sources = draw.integers(1, 100, (2000, 8))
    whole = Shapes(sources, sources)
    part = Shapes(sources[::50], sources[::50], is_complete=False)
    assert part.step.source >= 0.97 * whole.step.source
    assert part.step.source <= 8 * 99


@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_rows_of_one_length(batch_size: int) -> None:
    shapes = Shapes.longest(5, 7, 3)
    assert shapes.largest_micro_batch(batch_size) == Tokens(7 * batch_size, 3 * batch_size)
    assert sum(len(micro_batch) for micro_batch in shapes.worst_steps(batch_size)[0]) == 5


@pytest.mark.parametrize("seed", range(6))
def test_sizes_are_few_and_add_the_fewest_fillers(seed: int) -> None:
    sums = np.random.default_rng(seed).integers(100, 900, 60)
    sizes = few_sizes(sums, 950)
    assert len(sizes) == 4 and sizes[-1] >= 950 and all(size % 16 == 0 for size in sizes)

    def fillers(chosen: tuple[int, ...]) -> int:
        return sum(min(size for size in chosen if size >= one) - one for one in [*sums.tolist(), 950])

    edges = sorted({-(-int(one) // 16) * 16 for one in [*sums, 950]})
    for place, size in enumerate(sizes[:-1]):  # moving any one of them makes it no better
        others = [*sizes[:place], *sizes[place + 1 :]]
        assert all(fillers(tuple(sorted([*others, edge]))) >= fillers(sizes) for edge in edges), size


def test_few_sums_are_their_own_sizes() -> None:
    assert few_sizes(np.array([5, 5, 7]), 9) == (5, 7, 9)
    assert few_sizes(np.arange(1, 13), 12) == (16,)


@pytest.mark.parametrize("most", [None, 500])
@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_padded_tokens_are_those_of_the_batches(most: int | None, batch_size: int) -> None:
    draw = np.random.default_rng(0)
    sources, targets = draw.integers(20, 500, (5, 64)), draw.integers(10, 114, (5, 64))
    sources[4, 50:], targets[4, 50:] = 0, 0  # the last step of an epoch
    made = [0, 0]
    for step in zip(sources, targets, strict=True):
        rows = [Row(np.zeros(a, np.int64), np.zeros(b, np.int64), 0) for a, b in zip(*step, strict=True) if a]
        batches = [collate(group, 0) for group in filled(rows, batch_size, most)]
        sizes = sum(batch.input_ids.size for batch in batches), sum(batch.labels.size for batch in batches)
        made = [max(pair) for pair in zip(made, sizes, strict=True)]
    assert Shapes(sources, targets, max_tokens=most).padded_tokens(batch_size) == sum(made)


@pytest.mark.parametrize("max_tokens", [None, 60_000])
def test_lengths_in_two_bytes_are_counted_alike(max_tokens: int | None) -> None:
    draw = np.random.default_rng(3)
    sources, targets = (draw.integers(1, 2**15, (40, 12)) for _ in range(2))
    wide, narrow = (
        Shapes(sources.astype(dtype), targets.astype(dtype), False, max_tokens) for dtype in (np.int64, np.uint16)
    )
    assert narrow.step == wide.step and narrow.longest_row == wide.longest_row
    for batch_size in (1, 5, 12):
        sizes = wide.sizes(batch_size)
        assert narrow.sizes(batch_size) == sizes and narrow.count(batch_size) == wide.count(batch_size)
        assert narrow.largest_micro_batch(batch_size, sizes) == wide.largest_micro_batch(batch_size, sizes)
        assert narrow.together(batch_size, 2, sizes) == wide.together(batch_size, 2, sizes)
        assert narrow.padded_tokens(batch_size) == wide.padded_tokens(batch_size)
        assert narrow.worst_steps(batch_size, 2) == wide.worst_steps(batch_size, 2)
    assert Amount.mean_of(narrow) == Amount.mean_of(wide)


def test_where_tokens_bound_micro_batches_a_plan_keeps_one_table() -> None:
    """It asks for many sizes; a table of all rows for each would be hundreds of MiB of a long run."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 9, (50, 64))
    shapes = Shapes(lengths, lengths, max_tokens=64)
    for batch_size in range(1, 33):
        shapes.largest_micro_batch(batch_size)
        shapes.count(batch_size)
    kept = [value for value in shapes._known.values() if isinstance(value, np.ndarray)]
    assert not kept and shapes._known["micro-batch of rows"][1].shape == (50, 64)
    again = Shapes(lengths, lengths, max_tokens=64)
    assert again.count(7) == shapes.count(7)
