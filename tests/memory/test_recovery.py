from __future__ import annotations

import gc
import weakref

import pytest
import torch

from memory import recovery
from memory.recovery import free_failed, needed_bytes
from tests.fake_device import OUT_OF_MEMORY, FakeDevice

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize("flavour", OUT_OF_MEMORY)
def test_every_flavour_is_known_and_the_device_is_cleaned(flavour):
    device = FakeDevice(100 * MIB, flavour)
    with pytest.raises(BaseException) as caught:
        device.allocate(200 * MIB)
    assert device.is_out_of_memory(caught.value)
    free_failed(caught.value, device)
    assert device.cleanups == 1


def test_the_story_names_phase_batch_needed_and_free():
    device = FakeDevice(8 * GIB)
    device.allocate(7 * GIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        device.allocate(2 * GIB)
    shortage = free_failed(caught.value, device)
    story = shortage.describe("train", 8, "512 + 114 tokens")
    for part in ("phase train", "micro-batch 8 x 512 + 114 tokens", "needed 2.00 GiB", "1.00 GiB were free"):
        assert part in story


def test_on_the_host_the_free_memory_is_the_systems(monkeypatch):
    monkeypatch.setattr(recovery, "free_host_bytes", lambda: 5 * MIB)
    shortage = free_failed(MemoryError(), FakeDevice())
    assert shortage.free_bytes == 5 * MIB and shortage.needed_bytes is None
    assert "does not name" in shortage.describe("evaluation", 4, "")


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


@pytest.mark.parametrize(
    ("flavour", "expected"),
    [("cuda", 2 * GIB), ("mps", 2 * GIB), ("cpu", 2 * GIB), ("windows", 2 * GIB), ("c++", None), ("python", None)],
)
def test_needed_bytes_are_read_from_the_error(flavour, expected):
    assert needed_bytes(OUT_OF_MEMORY[flavour](2 * GIB)) == expected
