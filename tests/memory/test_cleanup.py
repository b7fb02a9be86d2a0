from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest
import torch

from memory import cleanup
from memory.cleanup import Cleaner, free_failed
from tests.fake_device import OUT_OF_MEMORY, FakeDevice

MIB, GIB = 2**20, 2**30
SAYING_SIZES = ("cuda", "mps", "cpu", "windows")


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
    assert cleaner.total_seconds > 0


@pytest.mark.parametrize("reuses_cache", [True, False])
def test_a_cache_that_serves_every_shape_is_not_emptied_by_schedule(calls, reuses_cache):
    device = FakeDevice(100 * MIB)
    device.reuses_cache = reuses_cache
    cleaner = Cleaner(device)
    for step in (50, 200):
        device.allocate(80 * MIB)
        device.release(80 * MIB)
        cleaner.after_step(step)
        assert calls[-1] == ("arrow" if step == 50 else "malloc")
    assert device.cleanups == (0 if reuses_cache else 2)
    cleaner.before("evaluation")
    cleaner.under_pressure()
    assert device.cleanups == (2 if reuses_cache else 4)


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


@pytest.mark.parametrize("flavour", OUT_OF_MEMORY)
def test_every_flavour_is_known_the_device_is_cleaned_and_the_needed_bytes_are_read(flavour):
    device = FakeDevice(100 * MIB, flavour)
    with pytest.raises(BaseException) as caught:
        device.allocate(2 * GIB)
    assert device.is_out_of_memory(caught.value)
    needed = free_failed(caught.value, device).needed_bytes
    assert device.cleanups == 1 and needed == (2 * GIB if flavour in SAYING_SIZES else None)


def test_the_story_names_phase_batch_needed_and_free():
    device = FakeDevice(8 * GIB)
    device.allocate(7 * GIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.allocate(2 * GIB)
    shortage = free_failed(caught.value, device)
    story = shortage.describe("train", 8, "512 + 114 tokens")
    for part in ("phase train", "micro-batch 8 x 512 + 114 tokens", "needed 2.00 GiB", "1.00 GiB free"):
        assert part in story


def test_on_the_host_the_free_memory_is_the_systems():
    shortage = free_failed(MemoryError(), FakeDevice())
    assert shortage.free_bytes > 0 and shortage.needed_bytes is None
    assert "micro-batch 4: needed an unknown amount" in shortage.describe("evaluation", 4, "")


class Activation:
    pass


def fail_with(kept):
    activation = Activation()
    kept.append(weakref.ref(activation))
    try:
        raise KeyError("first")
    except KeyError:
        raise MemoryError from None  # the first error stays behind as context


def test_what_the_failed_frames_held_is_freed_while_the_error_is_handled():
    kept: list[weakref.ref] = []
    gc.disable()
    try:
        fail_with(kept)
    except MemoryError as error:
        assert kept[0]() is not None
        free_failed(error, FakeDevice(MIB))
        assert kept[0]() is None
    finally:
        gc.enable()
