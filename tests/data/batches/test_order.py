from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batches.order import WINDOW_BLOCKS, Order


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**9), st.integers(0, 40))
def test_every_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int, block: int) -> None:
    rows = Order(num_rows, seed, block).rows(epoch * num_rows + np.arange(num_rows))
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


@pytest.mark.parametrize("block", [0, 16])
@given(num_rows=st.integers(1, 10**6), start=st.integers(0, 10**7), counts=st.lists(st.integers(0, 99), max_size=6))
def test_the_order_does_not_depend_on_how_it_is_asked_for(
    block: int, num_rows: int, start: int, counts: list[int]
) -> None:
    order = Order(num_rows, 7, block)
    whole = order.rows(start + np.arange(sum(counts)))
    places = np.cumsum([start, *counts])
    parts = [order.rows(int(place) + np.arange(count)) for place, count in zip(places, counts, strict=False)]
    assert np.array_equal(whole, np.concatenate([np.empty(0, np.int64), *parts]))


def test_seeds_and_epochs_differ_and_look_random() -> None:
    n = 10_000
    places = np.arange(n)
    first, second, other = Order(n, 1).rows(places), Order(n, 1).rows(n + places), Order(n, 2).rows(places)
    for a, b in ((first, second), (first, other)):
        assert (a == b).mean() < 0.01
    assert abs(np.abs(np.diff(first)).mean() / n - 1 / 3) < 0.02  # the mean distance of two random places


def test_order_is_pinned() -> None:
    """Changing the permutation would break the resume of runs made before."""
    assert Order(10, 42).rows(np.arange(10)).tolist() == [6, 2, 1, 9, 4, 5, 7, 8, 3, 0]


def test_a_window_reads_few_places_of_the_file() -> None:
    block, n = 32, 100_000
    order = Order(n, 3, block)
    window = order.rows(np.arange(WINDOW_BLOCKS * block))
    assert len(np.unique(window // block)) == WINDOW_BLOCKS  # whole blocks from all over the file
    assert (window // block).max() - (window // block).min() > n // block * 0.9
    assert (np.diff(window) == 1).mean() < 0.05  # mixed inside
    assert len(np.unique(Order(n, 3).rows(np.arange(WINDOW_BLOCKS * block)) // block)) > 10 * WINDOW_BLOCKS
