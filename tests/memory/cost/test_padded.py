"""What attention over padded rows holds: rows that lie as they are need no copy, and results are laid end to end once."""

from __future__ import annotations

import pytest

from memory.cost.padded import INDEX_BYTES, Padded

WIDTH = 64


def attention(queries: tuple[int, ...], keys: tuple[int, ...], is_fused: bool = False, scores: int = 1024) -> Padded:
    return Padded(1, WIDTH, 4, False, is_fused, False, queries, keys, scores)


@pytest.mark.parametrize(("is_fused", "copies"), [(False, 2), (True, 1)])
def test_results_of_many_small_groups_are_highest_while_they_are_laid_end_to_end(is_fused: bool, copies: int) -> None:
    even = attention((64,) * 40, (16,) * 40, is_fused)
    assert len(even.groups) > 1 and even.forward() == copies * 64 * 40 * WIDTH, "another order of heads takes a copy"
    uneven = attention((64, 50) * 20, (16,) * 40, is_fused)
    padded = sum(group.places * group.num_queries for group in uneven.groups)
    assert uneven.forward() == (2 * padded + (64 + 50) * 20) * WIDTH


def test_only_sides_that_are_padded_have_indices() -> None:
    assert attention((32, 32), (16, 16)).indices() == 0
    queries, keys = attention((32, 21), (16, 16)), attention((32, 32), (16, 9))
    for one, tokens, is_keys in ((queries, 53, False), (keys, 25, True)):
        padded = sum(group.places * (group.num_keys if is_keys else group.num_queries) for group in one.groups)
        assert one.indices() == INDEX_BYTES * 2 * (padded + tokens)
