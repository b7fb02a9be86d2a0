from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.batches.collate import Batch, Row
from data.batches.loader import StepLoader
from data.batches.order import Order, row_keys
from data.prepare.preparing import prepare
from settings.errors import UserError
from tests.data.loaders import loader_of

Rows = list[tuple[int, tuple[int, ...], tuple[int, ...]]]


def rows_of(batches: list[Batch]) -> Rows:
    """Key, input ids and labels of each row, without padding."""
    return [
        (int(key), tuple(inputs[:length].tolist()), tuple(labels[:target].tolist()))
        for batch in batches
        for key, inputs, length, labels, target in zip(
            batch.keys, batch.input_ids, batch.input_lengths, batch.labels, batch.target_lengths, strict=True
        )
    ]


@pytest.fixture(params=["pairs", "ul2"])
def loader(request: pytest.FixtureRequest, configure: Any) -> StepLoader:
    name = "pairs_file" if request.param == "pairs" else "text_file"
    config = configure(train_file=request.getfixturevalue(name), objective=request.param)
    prepared = prepare(config)
    return loader_of(prepared.train_dir, prepared.objective, config)


def step(loader: StepLoader, number: int, rows: int, batch_size: int, num_processes: int = 1) -> list[list[Batch]]:
    return [
        loader.micro_batches(
            number, effective_batch_size=rows, batch_size=batch_size, rank=rank, num_processes=num_processes
        )
        for rank in range(num_processes)
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(st.integers(0, 40), st.integers(1, 17), st.integers(1, 6), st.integers(1, 4))
def test_every_row_once_whatever_the_processes_and_the_micro_batch(
    loader: StepLoader, number: int, rows: int, batch_size: int, num_processes: int
) -> None:
    alone = rows_of(step(loader, number, rows, rows)[0])
    parts = step(loader, number, rows, batch_size, num_processes)
    together = [row for batches in parts for row in rows_of(batches)]
    assert sorted(together) == sorted(alone) and len(alone) == rows
    shares = [sum(batch.num_rows for batch in batches) for batches in parts]
    assert max(shares) - min(shares) <= 1 and shares == sorted(shares, reverse=True)
    assert all(batch.num_rows <= batch_size for batches in parts for batch in batches)


def test_an_epoch_sees_every_row_once(loader: StepLoader) -> None:
    steps = -(-loader.num_rows // 7)
    keys = []
    for number in range(steps):
        for batches in step(loader, number, 7, 2, 1 + number % 3):  # a run may go on with other processes
            keys += [key for key, _, _ in rows_of(batches)]
    expected = row_keys(loader.seed, np.arange(7 * steps)).view(np.int64).tolist()
    assert sorted(keys) == sorted(expected)
    order = Order(loader.num_rows, loader.seed)
    assert len(set(order.rows(np.arange(loader.num_rows)).tolist())) == loader.num_rows <= 7 * steps


def test_grouping_by_length_leaves_each_step_its_rows(configure: Any, pairs_file: Path) -> None:
    """So that it costs no learning: a step learns from the same rows, with the same dropout, in micro-batches of less
    padding.
    """
    seen, padded = {}, {}
    for grouped in (True, False):
        config = configure(train_file=pairs_file, group_by_length=grouped)
        loader = loader_of(prepare(config).train_dir, "pairs", config)
        steps = [step(loader, number, 16, 4)[0] for number in range(20)]
        seen[grouped] = [sorted(rows_of(batches)) for batches in steps]
        padded[grouped] = sum(batch.input_ids.size for batches in steps for batch in batches)
    assert seen[True] == seen[False] and padded[True] < padded[False]


def test_masks_change_with_the_epoch_and_the_seed(configure: Any, text_file: Path) -> None:
    config = configure(train_file=text_file)
    prepared = prepare(config)
    loader = loader_of(prepared.train_dir, "span", config)
    n = loader.num_rows
    places = [int(np.flatnonzero(loader._order.rows(epoch * n + np.arange(n)) == 5)[0]) + epoch * n for epoch in (0, 1)]
    first, second = (rows_of(step(loader, place, 1, 1)[0])[0] for place in places)
    assert first[0] != second[0] and first[1] != second[1]
    other = loader_of(prepared.train_dir, "span", configure(train_file=text_file, seed=7))
    assert rows_of(step(other, 0, 4, 4)[0]) != rows_of(step(loader, 0, 4, 4)[0])


def test_the_dataset_mode_changes_nothing(configure: Any, text_file: Path) -> None:
    config = configure(train_file=text_file)
    train_dir = prepare(config).train_dir
    modes = [loader_of(train_dir, "span", config, ultra_low_mem=ultra) for ultra in (False, True)]
    assert rows_of(step(modes[0], 3, 9, 4)[0]) == rows_of(step(modes[1], 3, 9, 4)[0])


def test_validation_sets_with_names_are_rows_apart(configure: Any, pairs_file: Path, tmp_path: Path) -> None:
    for name, count in (("a", 5), ("b", 3), ("c", 4)):
        rows = [{"prompt": f"{name}{number}", "response": "r"} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = f"news={tmp_path}/b.jsonl,{tmp_path}/a.jsonl,law={tmp_path}/c.jsonl"
    config = configure(train_file=pairs_file, objective="pairs", validation_file=spec)
    prepared = prepare(config)
    loader = loader_of(prepared.validation_dir, "pairs", config)
    assert loader.sets == {"news": range(8), "law": range(8, 12)}
    read = rows_of(list(loader.evaluation_batches(2, 2, rows=loader.sets["law"])))
    assert read == rows_of(list(loader.evaluation_batches(12, 12)))[8:10]
    with pytest.raises(UserError, match="a set twice"):
        prepare(config.changed(validation_file=f"{spec},news={tmp_path}/a.jsonl"))
    with pytest.raises(UserError, match="before the first name"):
        prepare(
            configure(train_file=pairs_file, objective="pairs", validation_file=f"{tmp_path}/a.jsonl,b={pairs_file}")
        )


def test_evaluation_reads_the_first_rows_once_with_fixed_masks(loader: StepLoader) -> None:
    alone = rows_of(list(loader.evaluation_batches(10, 10)))
    parts = [list(loader.evaluation_batches(10, 3, rank, 3)) for rank in range(3)]
    assert sorted(row for batches in parts for row in rows_of(batches)) == sorted(alone) and len(alone) == 10
    loader.seed += 1
    assert rows_of(list(loader.evaluation_batches(10, 10))) == alone


def test_pairs_of_longer_shards_are_cut(configure: Any, pairs_file: Path) -> None:
    train_dir = prepare(configure(train_file=pairs_file)).train_dir
    loader = loader_of(train_dir, "pairs", configure(train_file=pairs_file, max_seq_len=8, max_target_len=4))
    for _, inputs, labels in rows_of(step(loader, 0, 50, 50)[0]):
        assert len(inputs) <= 8 and inputs[-1] == 1 and len(labels) <= 4 and labels[-1] == 1


def test_micro_batches_are_filled_by_tokens(configure: Any, pairs_file: Path) -> None:
    config = configure(train_file=pairs_file)
    loader = loader_of(prepare(config).train_dir, "pairs", config)
    limited = loader_of(prepare(config).train_dir, "pairs", configure(train_file=pairs_file, batch_tokens=150))
    arguments = {"effective_batch_size": 60, "num_processes": 3}
    for rank in range(3):
        alone = loader.micro_batches(2, batch_size=60, rank=rank, **arguments)
        by_tokens = limited.micro_batches(2, batch_size=60, rank=rank, **arguments)
        assert rows_of(by_tokens) == rows_of(alone)
        assert all(batch.num_tokens <= 150 for batch in by_tokens)
        sizes = [batch.num_rows for batch in by_tokens]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]  # short rows come first, and many at once
        assert max(b.num_rows for b in limited.micro_batches(2, batch_size=5, rank=rank, **arguments)) <= 5


def test_the_longest_rows_are_known(configure: Any, pairs_file: Path, text_file: Path) -> None:
    for flags in ({}, {"max_seq_len": 16, "max_target_len": 4}):
        config = configure(train_file=pairs_file, **flags)
        loader = loader_of(prepare(config).train_dir, "pairs", config)
        seen = loader.micro_batches(0, effective_batch_size=loader.num_rows, batch_size=1)
        lengths = [(int(batch.input_lengths[0]), int(batch.target_lengths[0])) for batch in seen]
        assert loader.longest == tuple(max(side) for side in zip(*lengths, strict=True))
        assert loader.longest_answer == loader.longest[1]
    shorter = loader_of(prepare(configure(train_file=pairs_file)).train_dir, "pairs", config)
    assert shorter.longest == (16, 4)
    config = configure(train_file=text_file)
    loader = loader_of(prepare(config).train_dir, "span", config)
    assert loader.longest == (64, loader.lengths.target_tokens)


def test_rows_are_known_by_their_tokens_and_not_by_where_they_lie(configure: Any, pairs_file: Path) -> None:
    def content(file: Path, **changes: object) -> str:
        config = configure(train_file=file, objective="pairs").changed(**changes)
        return loader_of(prepare(config).train_dir, "pairs", config).content()

    first = content(pairs_file)
    lines = pairs_file.read_text(encoding="utf8").splitlines(keepends=True)
    moved = pairs_file.with_name("moved.jsonl")
    moved.write_text("".join(lines), encoding="utf8")
    assert content(moved) == first == content(pairs_file, seed=5)
    for changed in ([*lines, lines[0]], [lines[0], *lines], lines[1:], [*lines[1:], lines[0]]):
        moved.write_text("".join(changed), encoding="utf8")
        assert content(moved) != first


@pytest.mark.parametrize("is_sorted", [False, True])
def test_rows_are_held_in_one_form_alone(loader: StepLoader, is_sorted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were read, or in their batch: a step of thousands of rows takes no more than the plan counts."""
    read, most, plain, collated = list[weakref.ref[Any]](), list[int](), StepLoader._row, StepLoader._collate

    def noted(self: StepLoader, number: int, key: int) -> Row:
        row = plain(self, number, key)
        read.append(weakref.ref(row.labels))
        return row

    def counted(self: StepLoader, rows: Sequence[Row]) -> Batch:
        most.append(sum(labels() is not None for labels in read))
        return collated(self, rows)

    monkeypatch.setattr(StepLoader, "_row", noted)
    monkeypatch.setattr(StepLoader, "_collate", counted)
    loader.sorts_rows = is_sorted
    loader.micro_batches(0, effective_batch_size=24, batch_size=4)
    assert len(most) == 6
    assert most == sorted(most, reverse=True) and most[-1] <= 5 if is_sorted else max(most) <= 9
