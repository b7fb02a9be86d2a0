"""The worst batches, from the lengths of rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from data.batches.loader import filled
from devices.sizes import filled_tokens
from memory.estimate.shapes import Shapes, Tokens


def test_a_bound_of_tokens_is_priced_as_the_loader_cuts() -> None:
    most = 500
    batch_size = 6
    draw = np.random.default_rng(0)
    sources = draw.integers(20, 500, (9, 64))
    targets = draw.integers(10, 114, (9, 64))
    for side in (sources, targets):
        side[4, 50:] = 0  # The last step of an epoch has fewer rows.
        side[0, :4] = most // 4  # Two rows that are as many tokens as are allowed.
    shapes = Shapes(sources, targets, max_tokens=most)
    sizes = shapes.sizes(batch_size)
    steps = []  # Of each step, the filled tokens of its micro-batches, of both sides.
    for step in zip(sources, targets, strict=True):
        rows: list[Any] = [SimpleNamespace(lengths=pair) for pair in np.stack(step, 1)[step[0] > 0]]
        sums = np.array([sum(row.lengths for row in group) for group in filled(rows, batch_size, most)])
        steps.append([[filled_tokens(int(size), up_to) for size in sums[:, side]] for side, up_to in enumerate(sizes)])
    assert shapes.count(batch_size) == max(len(step[0]) for step in steps)
    largest = Tokens(*(max(max(step[side]) for step in steps) for side in (0, 1)))
    assert shapes.largest_micro_batch(batch_size, sizes) == largest
    whole = Tokens(*(max(sum(step[side]) for step in steps) for side in (0, 1)))
    assert shapes.together(batch_size, shapes.count(batch_size), sizes) == whole
    pair = shapes.together(batch_size, 2, sizes)
    for side, planned in enumerate((pair.source, pair.target)):
        assert all(planned >= sum(step[side][at : at + 2]) for step in steps for at in range(0, len(step[side]), 2))


def test_a_sample_of_the_steps_leaves_room_for_the_others() -> None:
    draw = np.random.default_rng(0)
    sources = draw.integers(1, 100, (2000, 8))
    whole = Shapes(sources, sources)
    part = Shapes(sources[::50], sources[::50], is_complete=False)
    assert part.step.source >= 0.97 * whole.step.source
    assert part.step.source <= 8 * 99


def test_the_worst_steps_have_the_most_tokens_of_both_sides_or_the_largest_micro_batch() -> None:
    shapes = Shapes(np.array([[10, 10], [25, 2]]), np.array([[9, 9], [1, 1]]))
    assert shapes.worst_steps(1) == [[((10, 9),), ((10, 9),)], [((25, 1),), ((2, 1),)]]
    assert shapes.worst_steps(2) == [[((10, 9), (10, 9))]]
    assert shapes.widest_micro_batch(1) == ((25, 1),)
