"""Which row stands at which position of a run, of one source and of several mixed by weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batches.mixture import TURN, Mixture
from data.batches.order import Order
from data.prepare.preparing import find_prepared, prepare
from settings.errors import UserError
from tests.data.loaders import loader_of, small_config, write_rows


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**9), st.integers(0, 40))
def test_every_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int, block: int) -> None:
    rows = Order(num_rows, seed, block).rows(epoch * num_rows + np.arange(num_rows))
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


@given(st.integers(1, 10**6), st.integers(0, 10**7), st.lists(st.integers(0, 99), max_size=6), st.integers(0, 9))
def test_any_part_of_a_run_is_what_the_whole_run_says(num_rows: int, start: int, counts: list[int], seed: int) -> None:
    for order in (Order(num_rows, seed), Order(num_rows, seed, 16), Mixture([40, num_rows], [2, 1], seed)):
        whole = order.rows(start + np.arange(sum(counts)))
        starts = np.cumsum([start, *counts]).tolist()
        parts = [order.rows(begin + np.arange(count)) for begin, count in zip(starts, counts, strict=False)]
        assert np.array_equal(whole, np.concatenate([np.empty(0, np.int64), *parts]))


def test_order_is_pinned() -> None:
    """Changing the permutation would break the resume of runs made before."""
    assert Order(10, 42).rows(np.arange(10)).tolist() == [6, 2, 1, 9, 4, 5, 7, 8, 3, 0]
    assert Order(200, 42, 3).rows(np.arange(195, 205)).tolist() == [199, 86, 121, 85, 84, 86, 129, 36, 99, 34]
    assert Mixture([5, 3], [0.7, 0.3], 42).rows(np.arange(10)).tolist() == [5, 7, 2, 4, 2, 0, 2, 1, 2, 5]


@pytest.fixture
def parts(tmp_path: Path) -> str:
    for name, rows in (("a", 400), ("b", 40)):
        lines = ({"text": f"{name * 40} {n}", "prompt": f"{name} {n}", "response": name} for n in range(rows))
        write_rows(tmp_path / f"{name}.jsonl", lines)
    return f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"


@pytest.mark.parametrize("objective", ["pairs", "span"])
def test_the_loader_mixes_the_parts_of_train_file(tmp_path: Path, parts: str, objective: str) -> None:
    config = small_config(tmp_path, train_file=parts, objective=objective, mixture_weights="0.25, 0.75")
    loader = loader_of(prepare(config).train_dir, objective, config)
    rows = [
        inputs
        for step in range(25)
        for batch in loader.micro_batches(step, effective_batch_size=40, batch_size=8)
        for inputs in batch.input_ids
    ]
    share = np.mean([int((row == ord("b") + 3).sum()) > int((row == ord("a") + 3).sum()) for row in rows])
    assert abs(share - 0.75) < 0.06 and len(rows) == 1000
    for weights in ("1,2,3", "1,x", "0,1"):
        with pytest.raises(UserError, match="--mixture_weights"):  # Before anything is prepared.
            find_prepared(small_config(tmp_path / "new", train_file=parts, mixture_weights=weights))


def test_a_turn_is_mixed_exactly_by_weight_and_every_row_of_a_source_comes_as_often() -> None:
    weights = [0.5, 0.3, 0.2]
    rows = Mixture([1000, 50, 7], weights, seed=3).rows(np.arange(TURN))
    sources = np.digitize(rows, [1000, 1050])
    assert np.abs(np.bincount(sources) / TURN - weights).max() < 1e-4
    for part in np.array_split(sources, 16):
        assert np.abs(np.bincount(part, minlength=3) / len(part) - weights).max() < 0.05, "evenly, not one by one"
    # Of a turn each source has half: 32,768 positions.
    counts = np.bincount(Mixture([2**13, 2**5], [1, 1], seed=1).rows(np.arange(TURN)))
    assert set(counts[: 2**13].tolist()) == {4} and set(counts[2**13 :].tolist()) == {1024}
