"""Memory that nobody uses is given back: by schedule, before large phases, under pressure, after an error."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.units import GIB, MIB
from memory import cleanup
from memory.cleanup import Cleaner, free_failed
from tests.fake_device import OUT_OF_MEMORY, FakeDevice

SAYING_SIZES = ("cuda", "mps", "cpu", "windows")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was cleaned, in order; nothing of the process itself is."""
    calls = list[str]()
    pool = types.SimpleNamespace(release_unused=lambda: calls.append("arrow"))
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(default_memory_pool=lambda: pool))
    monkeypatch.setattr(cleanup, "trim_malloc", lambda: calls.append("malloc"))
    monkeypatch.setattr(gc, "collect", lambda generation=2: calls.append(f"gc{generation}"))
    return calls


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def test_schedule_light_every_50_full_every_200_each_in_its_order(calls: list[str]) -> None:
    cleaner = Cleaner(FakeDevice())
    records = {step: cleaner.after_step(step) for step in range(401)}
    kinds = {step: record.kind for step, record in records.items() if record is not None}
    assert kinds == {step: "light" if step % 200 else "full" for step in range(50, 401, 50)}
    assert calls[:2] == ["gc1", "arrow"] and calls[6:9] == ["gc2", "arrow", "malloc"]


@pytest.mark.parametrize("reuses_cache", [True, False])
def test_a_cache_that_serves_every_shape_is_not_emptied_by_schedule(calls: list[str], reuses_cache: bool) -> None:
    device = FakeDevice(100 * MIB)
    device.reuses_cache = reuses_cache
    cleaner = Cleaner(device)
    for step in (50, 200):
        device.allocate(80 * MIB)
        device.release(80 * MIB)
        cleaner.after_step(step)
    assert device.cleanups == (0 if reuses_cache else 2)
    device.allocate(100 * MIB)
    device.release(90 * MIB)
    records = [cleaner.before("epoch"), cleaner.under_pressure()]
    assert device.cleanups == (2 if reuses_cache else 4) and device.memory_now_bytes() == 10 * MIB
    assert [(record.kind, record.reason) for record in records] == [("full", "epoch"), ("full", "pressure")]
    assert records[0].freed_bytes >= 80 * MIB and cleaner.total_seconds > 0


class Node:
    itself: Any


def cycle() -> tuple[Node, weakref.ref[Node]]:
    node = Node()
    node.itself = node
    return node, weakref.ref(node)


def test_real_garbage_is_collected_also_what_was_set_aside(without_collector: None) -> None:
    cleaner = Cleaner(FakeDevice())
    node, used = cycle()
    garbage = cycle()[1]
    cleaner.settle()
    assert gc.get_freeze_count() > 0 and garbage() is None, "garbage is not set aside with what is used"
    del node
    cleaner.before("epoch")
    assert used() is not None, "objects set aside are not walked through by ordinary cleanings"
    cleaner.under_pressure()
    assert used() is None and gc.get_freeze_count() > 0


@pytest.mark.parametrize("flavour", OUT_OF_MEMORY)
@pytest.mark.usefixtures("calls")
def test_every_flavour_is_known_the_device_is_cleaned_and_the_needed_bytes_are_read(flavour: str) -> None:
    device = FakeDevice(100 * MIB, flavour)
    with pytest.raises(BaseException) as caught:
        device.allocate(2 * GIB)
    assert device.is_out_of_memory(caught.value)
    needed = free_failed(caught.value, device).needed_bytes
    assert device.cleanups == 1 and needed == (2 * GIB if flavour in SAYING_SIZES else None)


@pytest.mark.usefixtures("calls")
def test_the_story_names_phase_batch_needed_and_free() -> None:
    device = FakeDevice(8 * GIB)
    device.allocate(7 * GIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.allocate(2 * GIB)
    story = free_failed(caught.value, device).describe("train", 8, "512 + 114 tokens")
    for part in ("phase train", "micro-batch 8 x 512 + 114 tokens", "needed 2.00 GiB", "1.00 GiB free"):
        assert part in story
    on_host = free_failed(MemoryError(), FakeDevice())
    assert on_host.free_bytes > 0 and on_host.needed_bytes is None
    assert "micro-batch 4: needed an unknown amount" in on_host.describe("evaluation", 4, "")


def fail(references: list[weakref.ref[Node]]) -> None:
    activation = Node()
    references.append(weakref.ref(activation))
    try:
        raise KeyError("first")
    except KeyError:
        raise MemoryError from None  # The first error stays behind as context.


def test_the_frames_of_a_failed_step_are_freed_while_the_error_is_handled(without_collector: None) -> None:
    references = list[weakref.ref[Node]]()
    try:
        fail(references)
    except MemoryError as error:
        assert references[0]() is not None
        free_failed(error, FakeDevice(MIB))
        assert references[0]() is None
