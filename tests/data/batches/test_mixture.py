from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batches import mixture as mixture_module
from data.batches.mixture import TURN, Mixture, quotas
from data.prepare.preparing import find_prepared, prepare
from settings.errors import UserError
from tests.data.loaders import loader_of


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_quotas_fill_a_turn_and_leave_nobody_out(weights: list[float]) -> None:
    parts = quotas(weights)
    assert sum(parts) == TURN and min(parts) >= 1
    wanted = np.array(weights) / sum(weights) * TURN
    assert np.abs(np.array(parts) - wanted).max() <= len(weights)


def test_a_turn_is_mixed_exactly_by_weight() -> None:
    rows = Mixture([1000, 50, 7], [0.5, 0.3, 0.2], seed=3).rows(np.arange(TURN))
    sources = np.digitize(rows, [1000, 1050])
    assert np.abs(np.bincount(sources) / TURN - [0.5, 0.3, 0.2]).max() < 1e-4
    for part in np.array_split(sources, 16):  # evenly, not one source after the other
        assert np.abs(np.bincount(part, minlength=3) / len(part) - [0.5, 0.3, 0.2]).max() < 0.05


def test_every_row_of_a_source_comes_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_module, "TURN", 64)
    mixture = Mixture([300, 20], [0.5, 0.5], seed=1)
    mixture.quotas, mixture._begins = [32, 32], np.array([0, 32, 64])
    counts = np.bincount(mixture.rows(np.arange(64 * 75)), minlength=320)  # 2400 places of each: 8 and 120 epochs
    assert set(counts[:300].tolist()) == {8} and set(counts[300:].tolist()) == {120}


@given(st.integers(0, 3 * TURN), st.integers(0, 500), st.integers(0, 9))
def test_any_part_of_the_run_is_what_the_whole_run_says(position: int, count: int, seed: int) -> None:
    mixture, places = Mixture([40, 3000], [2, 1], seed), position + np.arange(count + 7)
    assert mixture.rows(places)[:count].tolist() == mixture.rows(places[:count]).tolist()


def files(tmp_path: Path, kind: str) -> str:
    paths = []
    for name, rows in (("a", 400), ("b", 40)):
        path = tmp_path / f"{name}.jsonl"
        lines = ({"text": f"{name * 40} {n}", "prompt": f"{name} {n}", "response": name} for n in range(rows))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        paths.append(str(path))
    return ",".join(paths)


@pytest.mark.parametrize("objective, seen", [("pairs", 1), ("span", 20)])
def test_the_loader_mixes_the_parts_of_train_file(configure: Any, tmp_path: Path, objective: str, seen: int) -> None:
    config = configure(train_file=files(tmp_path, objective), objective=objective, mixture_weights="0.25, 0.75")
    prepared = prepare(config)
    loader = loader_of(prepared.train_dir, prepared.objective, config)
    drawn = [
        batch.input_ids[row]
        for step in range(25)
        for batch in loader.micro_batches(step, effective_batch_size=40, batch_size=8)
        for row in range(batch.num_rows)
    ]
    share = np.mean([int((row == ord("b") + 3).sum()) > int((row == ord("a") + 3).sum()) for row in drawn])
    assert abs(share - 0.75) < 0.06 and len(drawn) == 1000


def test_weights_must_fit_the_parts(configure: Any, tmp_path: Path) -> None:
    spec = files(tmp_path, "pairs")
    for weights in ("1,2,3", "1,x", "0,1"):
        with pytest.raises(UserError, match="--mixture_weights"):  # before anything is prepared
            find_prepared(configure(train_file=spec, mixture_weights=weights))
