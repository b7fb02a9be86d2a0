"""What preparing may take follows from the budget: which room a tokenizer gets, and how many processes encode."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from config import load
from data.prepare import room
from data.tokenizers.sample import LARGE, SMALL
from units import GIB, MIB


@pytest.mark.parametrize(
    "budget, machine, expected",
    [
        ("8G", 16 * GIB, (LARGE, 4)),
        ("8G", 1 * GIB, (SMALL, 4)),  # the machine has less than the budget
        ("600M", 16 * GIB, (SMALL, 3)),
        ("480M", 16 * GIB, (SMALL, 2)),
        ("400M", 16 * GIB, (SMALL, 0)),  # one process that encodes is no faster than the one that reads
        ("auto", 2 * GIB, (LARGE, 4)),
        ("auto", 320 * MIB, (SMALL, 0)),
    ],
)
def test_room_by_budget(
    budget: str, machine: int, expected: tuple[object, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "host_limits", lambda: [SimpleNamespace(bytes=machine), SimpleNamespace(bytes=64 * GIB)])
    monkeypatch.setattr(room, "usable_cores", lambda: 16)
    config = load("train", {"train_file": "x", "memory_budget": budget})
    assert (room.tokenizer_room(config), room.workers(config, GIB)) == expected
    assert room.workers(config, MIB) == 0
