"""Labels of whole texts: numbers, or names in order; their shards and presets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import LowMemDataset
from data.prepare.preparing import Prepared, prepare, prepare_evaluation
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load
from tests.tasks.presets import presets_of

Configure = Callable[..., Config]


def rows_of(prepared: Prepared) -> list[dict[str, Any]]:
    return list(LowMemDataset(prepared.train_dir))


def test_numbers_are_predicted_and_names_are_sorted(configure: Configure, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.csv"
    names = tmp_path / "names.parquet"
    numbers.write_text("text,label\n" + "".join(f"text {at},{at / 8}\n" for at in range(200)))
    table = {
        "text": [f"text {at}" for at in range(200)],
        "label": [["spam", "ham", "eggs"][at % 3] for at in range(200)],
    }
    pq.write_table(pa.table(table), names)
    prepared = prepare(configure(train_file=numbers, head="sequence", labels="regression"))
    assert prepared.labels == () and [row["labels"].tolist() for row in rows_of(prepared)][:2] == [[0.0], [0.25]]
    with pytest.raises(UserError, match="--labels=regression"):
        prepare(configure(train_file=numbers, head="sequence"))
    prepared = prepare(configure(train_file=names, head="sequence"))
    assert prepared.labels == ("eggs", "ham", "spam") and rows_of(prepared)[0]["labels"].tolist() == [2]
    ordered = configure(train_file=names, head="sequence", labels="spam,ham,eggs")
    assert rows_of(prepare(ordered))[0]["labels"].tolist() == [0]
    with pytest.raises(UserError, match="'eggs'"):
        prepare(configure(train_file=names, head="sequence", labels="spam,ham"))
    evaluated = prepare_evaluation(
        configure(train_file=numbers, validation_file=names, head="sequence", labels="spam,ham,eggs")
    )
    assert evaluated.counts["validation_rows"] == 200


@pytest.mark.parametrize("preset", presets_of("sequence"))
def test_presets_load(preset: str) -> None:
    config = load("train", {"preset": preset, "train_file": "x"})
    assert (config.model.head, config.data.objective) == ("sequence", "sequence")
