from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batches.collate import Batch
from data.batches.loader import StepLoader
from data.batches.order import Order, row_keys
from data.prepare.preparing import prepare
from tests.data.batches.conftest import MakeLoader
from tests.data.loaders import loader_of, small_config, write_rows

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


@pytest.fixture(scope="module", params=["pairs", "ul2"])
def loader(request: pytest.FixtureRequest, make_loader: MakeLoader) -> StepLoader:
    return make_loader(request.param)


def step(loader: StepLoader, number: int, rows: int, batch_size: int, num_processes: int = 1) -> list[list[Batch]]:
    return [
        loader.micro_batches(
            number, effective_batch_size=rows, batch_size=batch_size, rank=rank, num_processes=num_processes
        )
        for rank in range(num_processes)
    ]


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


def test_grouping_by_length_leaves_each_step_its_rows(make_loader: MakeLoader) -> None:
    """So that it costs no learning: a step learns from the same rows, with the same dropout, in micro-batches of less
    padding.
    """
    loaders = [make_loader("pairs", group_by_length=is_grouped) for is_grouped in (True, False)]
    grouped, plain = ([step(loader, number, 16, 4)[0] for number in range(20)] for loader in loaders)
    for one, another in zip(grouped, plain, strict=True):
        assert sorted(rows_of(one)) == sorted(rows_of(another))
    padded = [sum(batch.input_ids.size for batches in steps for batch in batches) for steps in (grouped, plain)]
    assert padded[0] < padded[1]


def test_masks_change_with_the_epoch_and_the_seed(make_loader: MakeLoader) -> None:
    loader = make_loader("span")
    positions = np.arange(2 * loader.num_rows)
    number = Order(loader.num_rows, loader.seed).rows(positions)
    first, second = (rows_of(step(loader, int(at), 1, 1)[0])[0] for at in positions[number == 5])
    assert first[0] != second[0] and first[1] != second[1]
    assert rows_of(step(make_loader("span", seed=7), 0, 4, 4)[0]) != rows_of(step(loader, 0, 4, 4)[0])
    reopening = make_loader("span", ultra_low_mem=True)
    assert rows_of(step(reopening, 3, 9, 4)[0]) == rows_of(step(loader, 3, 9, 4)[0]), "how files are read changes none"


def test_validation_sets_with_names_are_rows_apart(files: dict[str, Path], tmp_path: Path) -> None:
    for name, count in (("a", 5), ("b", 3), ("c", 4)):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}", "response": "r"} for n in range(count)])
    spec = f"news={tmp_path}/b.jsonl,{tmp_path}/a.jsonl,law={tmp_path}/c.jsonl"
    config = small_config(tmp_path, train_file=files["pairs"], objective="pairs", validation_file=spec)
    loader = loader_of(prepare(config).validation_dir, "pairs", config)
    assert loader.sets == {"news": range(8), "law": range(8, 12)}
    law = rows_of(list(loader.evaluation_batches(2, 2, rows=loader.sets["law"])))
    assert law == rows_of(list(loader.evaluation_batches(12, 12)))[8:10]


def test_evaluation_reads_the_first_rows_once_with_fixed_masks(make_loader: MakeLoader) -> None:
    for objective in ("pairs", "ul2"):
        loader = make_loader(objective)
        alone = rows_of(list(loader.evaluation_batches(10, 10)))
        parts = [list(loader.evaluation_batches(10, 3, rank, 3)) for rank in range(3)]
        assert sorted(row for batches in parts for row in rows_of(batches)) == sorted(alone) and len(alone) == 10
        assert rows_of(list(make_loader(objective, seed=99).evaluation_batches(10, 10))) == alone


def test_micro_batches_are_filled_by_tokens(make_loader: MakeLoader) -> None:
    loader, limited = make_loader("pairs"), make_loader("pairs", batch_tokens=150)
    arguments = {"effective_batch_size": 60, "num_processes": 3}
    for rank in range(3):
        alone = loader.micro_batches(2, batch_size=60, rank=rank, **arguments)
        by_tokens = limited.micro_batches(2, batch_size=60, rank=rank, **arguments)
        assert rows_of(by_tokens) == rows_of(alone)
        assert all(batch.num_tokens <= 150 for batch in by_tokens)
        sizes = [batch.num_rows for batch in by_tokens]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1], "many short rows come first"
        assert max(b.num_rows for b in limited.micro_batches(2, batch_size=5, rank=rank, **arguments)) <= 5


def test_rows_are_known_by_their_tokens_and_not_by_where_they_lie(
    make_loader: MakeLoader, files: dict[str, Path], tmp_path: Path
) -> None:
    content = make_loader("pairs").content()
    lines = files["pairs"].read_text(encoding="utf8").splitlines(keepends=True)
    path = tmp_path / "moved.jsonl"
    for number, other in enumerate((lines, [*lines, lines[0]], [*lines[1:], lines[0]])):
        path.write_text("".join(other), encoding="utf8")
        assert (make_loader("pairs", train_file=path, seed=5).content() == content) == (number == 0)


def test_an_epoch_sees_every_row_once(loader: StepLoader) -> None:
    steps = -(-loader.num_rows // 7)
    keys = []
    for number in range(steps):
        for batches in step(loader, number, 7, 2, 1 + number % 3):  # A run may go on with other processes.
            keys += [key for key, _, _ in rows_of(batches)]
    expected = row_keys(loader.seed, np.arange(7 * steps)).view(np.int64).tolist()
    assert sorted(keys) == sorted(expected)
    order = Order(loader.num_rows, loader.seed)
    assert len(set(order.rows(np.arange(loader.num_rows)).tolist())) == loader.num_rows <= 7 * steps
