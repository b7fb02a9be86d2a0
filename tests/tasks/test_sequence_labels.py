"""Labels of whole texts: their shards and their presets."""

from __future__ import annotations

import pytest

from data.task import shard_readers
from settings.loading import load
from tests.tasks.presets import presets_of


def test_shards_of_these_labels_are_read_by_this_task() -> None:
    assert shard_readers()["sequence"].name == "sequence"


@pytest.mark.parametrize("preset", presets_of("sequence"))
def test_presets_load(preset: str) -> None:
    config = load("train", {"preset": preset, "train_file": "x"})
    assert (config.model.head, config.data.objective) == ("sequence", "sequence")
