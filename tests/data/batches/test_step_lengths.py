"""The lengths that are looked up ahead are those of the batches that come."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.batches import step_lengths as module
from data.batches.loader import StepLoader
from data.batches.step_lengths import evaluation_lengths, step_lengths
from data.prepare.preparing import prepare
from tests.data.loaders import loader_of, small_config, write_rows


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    rows = [
        {"text": "a" * 400, "prompt": "p" * draw.randint(1, 90), "response": "r" * draw.randint(1, 60)}
        for _ in range(150)
    ]
    return write_rows(tmp_path_factory.mktemp("lengths") / "rows.jsonl", rows)


def loader_and_folder(file: Path, objective: str, **flags: Any) -> tuple[StepLoader, Path]:
    config = small_config(file.parent, train_file=file, objective=objective, **flags)
    folder = prepare(config).train_dir
    return loader_of(folder, objective, config), folder


@pytest.mark.parametrize(
    ("objective", "grouped", "processes"),
    [("pairs", True, 2), ("span", False, 1), ("denoise", False, 1), ("ul2", True, 2), ("prefix", False, 2)],
)
def test_they_are_those_of_the_batches(file: Path, objective: str, grouped: bool, processes: int) -> None:
    loader, folder = loader_and_folder(file, objective, group_by_length=grouped)
    lengths = step_lengths(loader, folder, range(3, 9), 7, processes)
    assert lengths.is_complete
    for number, step in enumerate(range(3, 9)):
        for rank in range(processes):
            batches = loader.micro_batches(
                step, effective_batch_size=7, batch_size=7, rank=rank, num_processes=processes
            )
            expected = sorted(
                (int(s), int(t)) for b in batches for s, t in zip(b.input_lengths, b.target_lengths, strict=True)
            )
            line = {"pairs": rank * 6 + number, "span": 0, "denoise": 0}.get(objective, number * processes + rank)
            pairs = zip(lengths.sources[line].tolist(), lengths.targets[line].tolist(), strict=True)
            assert sorted(pair for pair in pairs if pair[0])[-len(expected) :] == expected


@pytest.mark.parametrize(
    ("grouped", "limits", "shape"),
    [(True, {"MOST_POSITIONS": 80}, (10, 8)), (False, {"MOST_ROWS": 10, "MOST_MADE_ROWS": 24}, (3, 8))],
)
def test_of_many_steps_some_are_looked_at_and_the_longest_row_of_all_is_among_them(
    file: Path, monkeypatch: pytest.MonkeyPatch, grouped: bool, limits: dict[str, int], shape: tuple[int, int]
) -> None:
    """It comes in some step: a plan for a sample alone would not hold it."""
    loader, folder = loader_and_folder(file, "pairs", group_by_length=grouped, max_seq_len=128)
    for name, limit in limits.items():
        monkeypatch.setattr(module, name, limit)
    lengths = step_lengths(loader, folder, range(1000), 8)
    assert not lengths.is_complete and lengths.sources.shape == shape and max(loader.longest) > 80
    assert (lengths.sources.max(), lengths.targets.max()) == loader.longest
    assert not grouped or (np.diff(lengths.sources) >= 0).all(), "rows stay in their order"
    monkeypatch.setattr(module, "MOST_MADE_ROWS", 2)
    assert evaluation_lengths(loader, 99).sources.max() == loader.longest[0]
