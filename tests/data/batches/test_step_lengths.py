"""The lengths that are looked up ahead are those of the batches that come."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.batches import step_lengths as module
from data.batches.step_lengths import drawn_lengths, evaluation_lengths, step_lengths
from data.prepare.preparing import prepare
from settings.declared import Config
from settings.loading import load
from tests.data.loaders import loader_of

ROWS = 150


def prepared(folder: Path, objective: str, **flags: Any) -> tuple[Config, Any]:
    draw = random.Random(0)
    row = (
        (lambda: {"text": "a" * 400})
        if objective != "pairs"
        else (lambda: {"prompt": "p" * draw.randint(1, 90), "response": "r" * draw.randint(1, 60)})
    )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(ROWS)))
    words = {
        "train_file": folder / "rows.jsonl",
        "tokenizer_type": "byte",
        "max_seq_len": 64,
        "objective": objective,
        "cache_dir": folder / "cache",
        "prepare_workers": 0,
        **flags,
    }
    config = load("train", {name: str(value) for name, value in words.items()})
    return config, prepare(config)


@pytest.mark.parametrize(
    ("objective", "grouped", "processes"),
    [("pairs", True, 2), ("span", False, 1), ("denoise", False, 1), ("ul2", True, 2), ("prefix", False, 2)],
)
def test_they_are_those_of_the_batches(tmp_path: Path, objective: str, grouped: bool, processes: int) -> None:
    config, made = prepared(tmp_path, objective, group_by_length=grouped)
    loader = loader_of(made.train_dir, made.objective, config)
    found = step_lengths(loader, made.train_dir, range(3, 9), 7, processes)
    assert found.is_complete
    for place, step in enumerate(range(3, 9)):
        for rank in range(processes):
            batches = loader.micro_batches(
                step, effective_batch_size=7, batch_size=7, rank=rank, num_processes=processes
            )
            expected = sorted(
                (int(s), int(t)) for b in batches for s, t in zip(b.input_lengths, b.target_lengths, strict=True)
            )
            at = {"pairs": rank * 6 + place, "span": 0, "denoise": 0}.get(objective, place * processes + rank)
            rows = [row for row in zip(found.sources[at].tolist(), found.targets[at].tolist(), strict=True) if row[0]]
            assert sorted(rows)[-len(expected) :] == expected


def test_many_steps_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, made = prepared(tmp_path, "pairs")
    loader = loader_of(made.train_dir, made.objective, config)
    monkeypatch.setattr(module, "MOST_POSITIONS", 80)
    found = step_lengths(loader, made.train_dir, range(1000), 8)
    assert not found.is_complete and found.sources.shape == (10, 8)
    monkeypatch.setattr(module, "MOST_ROWS", 10)
    monkeypatch.setattr(module, "MOST_MADE_ROWS", 24)
    assert step_lengths(loader, made.train_dir, range(1000), 8).sources.shape == (3, 8)


@pytest.mark.parametrize(
    ("grouped", "limits"), [(True, {"MOST_POSITIONS": 16}), (False, {"MOST_ROWS": 10, "MOST_MADE_ROWS": 16})]
)
def test_the_longest_row_of_all_is_among_those_that_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grouped: bool, limits: dict[str, int]
) -> None:
    """It comes in some step: a plan for a sample alone would not hold it."""
    config, made = prepared(tmp_path, "pairs", group_by_length=grouped, max_seq_len=128)
    loader = loader_of(made.train_dir, made.objective, config)
    for name, limit in limits.items():
        monkeypatch.setattr(module, name, limit)
    found = step_lengths(loader, made.train_dir, range(1000), 8)
    assert not found.is_complete and max(loader.longest) > 80
    assert (found.sources.max(), found.targets.max()) == loader.longest
    assert not grouped or (np.diff(found.sources) >= 0).all(), "rows stay in their order"
    monkeypatch.setattr(module, "MOST_MADE_ROWS", 2)
    assert evaluation_lengths(loader, 99).sources.max() == loader.longest[0]


def test_evaluation(tmp_path: Path) -> None:
    config, made = prepared(tmp_path, "pairs")
    loader = loader_of(made.train_dir, made.objective, config)
    found = evaluation_lengths(loader, 20, 2)
    lengths = [
        sorted(int(n) for batch in loader.evaluation_batches(20, 4, rank, 2) for n in batch.input_lengths)
        for rank in (0, 1)
    ]
    assert np.sort(found.sources, axis=1).tolist() == lengths


def test_drawn_steps_hold_the_longest_row() -> None:
    lengths = np.arange(1, 11), np.arange(11, 21)
    drawn, again = (drawn_lengths(lengths, (99, 50), 8) for _ in range(2))
    assert drawn.sources.shape == (256, 8) and (drawn.sources == again.sources).all() and not drawn.is_complete
    assert int(drawn.sources.max()) == 99 and int(drawn.targets.max()) == 50
    halves = drawn_lengths(lengths, (99, 50), 8, num_processes=2, sorts_rows=True)
    assert halves.sources.shape == (512, 4) and (np.diff(halves.sources[:256], axis=1) >= 0).all()
