from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest

from memory import cleanup
from memory.cleanup import Cleaner
from tests.fake_device import FakeDevice

MIB = 2**20


@pytest.fixture
def calls(monkeypatch):
    """What was cleaned, in order."""
    calls = []
    pool = types.SimpleNamespace(release_unused=lambda: calls.append("arrow"))
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(default_memory_pool=lambda: pool))
    monkeypatch.setattr(cleanup, "trim_malloc", lambda: calls.append("malloc"))
    monkeypatch.setattr(cleanup.gc, "collect", lambda generation=2: calls.append(f"gc{generation}"))
    return calls


def test_schedule_light_every_50_full_every_200(calls):
    cleaner = Cleaner(FakeDevice())
    done = {step: record.kind for step in range(401) if (record := cleaner.after_step(step)) is not None}
    assert done == {s: "full" if s % 200 == 0 else "light" for s in range(50, 401, 50)}
    assert cleaner.counts == {"light": 6, "full": 2}


def test_light_takes_young_garbage_and_arrow_full_takes_all_in_order(calls):
    cleaner = Cleaner(FakeDevice())
    cleaner.after_step(50)
    assert calls == ["gc1", "arrow"]
    calls.clear()
    record = cleaner.before("evaluation")
    assert calls == ["gc2", "arrow", "malloc"] and (record.kind, record.reason) == ("full", "evaluation")


def test_full_tells_what_the_device_gave_back_and_what_it_cost(calls):
    device = FakeDevice(100 * MIB)
    device.allocate(100 * MIB)
    device.release(90 * MIB)
    cleaner = Cleaner(device)
    records = [cleaner.before("epoch"), cleaner.under_pressure()]
    assert device.memory_now_bytes() == 10 * MIB and records[0].freed_bytes >= 80 * MIB
    assert [record.reason for record in records] == ["epoch", "pressure"]
    assert cleaner.total_seconds == pytest.approx(sum(record.seconds for record in records)) and records[0].seconds > 0


class Node:
    pass


def _cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_real_garbage_is_collected_also_what_was_set_aside():
    gc.disable()
    try:
        cleaner = Cleaner(FakeDevice())
        seen = _cycle()
        cleaner.before("epoch")
        assert seen() is None
        held = Node()
        held.itself, seen = held, weakref.ref(held)
        lost = Node()
        lost.itself, seen_lost = lost, weakref.ref(lost)
        del lost
        cleaner.settle()
        assert gc.get_freeze_count() > 0 and seen_lost() is None, "garbage is not set aside with what is used"
        del held
        cleaner.before("epoch")
        assert seen() is not None, "objects set aside are not walked through by ordinary cleanings"
        cleaner.under_pressure()
        assert seen() is None and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
