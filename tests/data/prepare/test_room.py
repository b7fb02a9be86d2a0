"""What preparing may take follows from the budget: which room a tokenizer gets, and how many processes encode."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from common.units import GIB, MIB
from data.prepare import looking
from data.tokenizers.sample import LARGE, SMALL
from settings.loading import load


@pytest.mark.parametrize(
    "budget, machine, expected",
    [
        ("8G", 16 * GIB, (LARGE, 4)),
        ("600M", 16 * GIB, (SMALL, 3)),
        ("400M", 16 * GIB, (SMALL, 0)),  # one process that encodes is no faster than the one that reads
        ("auto", 320 * MIB, (SMALL, 0)),
    ],
)
def test_room_by_budget(
    budget: str, machine: int, expected: tuple[object, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        looking, "host_limits", lambda: [SimpleNamespace(bytes=machine), SimpleNamespace(bytes=64 * GIB)]
    )
    monkeypatch.setattr(looking, "usable_cores", lambda: 16)
    memory_budget = load("train", {"memory_budget": budget}).memory.memory_budget
    assert (looking.tokenizer_limits(memory_budget), looking.workers("auto", "auto", memory_budget, GIB)) == expected
    assert looking.workers("auto", "auto", memory_budget, MIB) == 0
    assert looking.workers(3, "auto", memory_budget, MIB) == 3
