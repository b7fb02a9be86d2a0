"""Spans of text: what the program pretrains by where nothing else is said."""

from __future__ import annotations

from data.task import shard_readers
from settings.tasks import TASKS, default_objective, is_pretraining


def test_text_is_pretrained_on() -> None:
    assert [name for name in TASKS if is_pretraining(name)] == ["span", "ul2", "prefix", "denoise"]
    assert default_objective(is_finetune=False) == "span"


def test_the_shards_of_all_objectives_of_text_are_streams() -> None:
    assert shard_readers()["stream"].name == "span"
