"""Memory that nobody uses is given back: by schedule, before large phases, under pressure, after an error."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest

from memory import cleanup
from memory.cleanup import Cleaner, free_failed
from support.units import MIB
from tests.fake_device import FakeDevice


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was cleaned, in order; nothing of the process itself is."""
    calls = list[str]()
    pool = types.SimpleNamespace(release_unused=lambda: calls.append("arrow"))
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(default_memory_pool=lambda: pool))
    monkeypatch.setattr(cleanup, "trim_malloc", lambda: calls.append("malloc"))
    monkeypatch.setattr(gc, "collect", lambda generation=2: calls.append(f"gc{generation}"))
    return calls


def test_schedule_light_every_50_full_every_200_each_in_its_order(calls: list[str]) -> None:
    cleaner = Cleaner(FakeDevice())
    records = {step: cleaner.after_step(step) for step in range(401)}
    kinds = {step: record.kind for step, record in records.items() if record is not None}
    assert kinds == {step: "light" if step % 200 else "full" for step in range(50, 401, 50)}
    assert calls[:2] == ["gc1", "arrow"] and calls[6:9] == ["gc2", "arrow", "malloc"]


class Node:
    pass


def fail(references: list[weakref.ref[Node]]) -> None:
    activation = Node()
    references.append(weakref.ref(activation))
    try:
        raise KeyError("first")
    except KeyError:
        raise MemoryError from None  # The first error stays behind as context.


def test_the_frames_of_a_failed_step_are_freed_while_the_error_is_handled() -> None:
    references = list[weakref.ref[Node]]()
    try:
        fail(references)
    except MemoryError as error:
        assert references[0]() is not None
        free_failed(error, FakeDevice(MIB))
        assert references[0]() is None
