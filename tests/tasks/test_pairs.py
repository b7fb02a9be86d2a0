"""Pairs: what the program finetunes by where nothing else is said."""

from __future__ import annotations

from data.task import shard_readers
from settings.tasks import default_objective


def test_pairs_finetune() -> None:
    assert default_objective(is_finetune=True) == "pairs"


def test_shards_of_pairs_are_read_by_this_task() -> None:
    assert shard_readers()["pairs"].name == "pairs"
