"""The fake stands for hardware that is not here, so it is tested itself."""

from __future__ import annotations

import pytest
import torch

from devices.base import Device
from devices.cpu import CpuDevice
from tests.fake_device import OUT_OF_MEMORY, FakeDevice

MIB = 2**20


def test_every_flavour_is_raised_when_it_is_full_and_recognised() -> None:
    for flavour in OUT_OF_MEMORY:
        device = FakeDevice(10 * MIB, flavour)
        device.allocate(8 * MIB)
        with pytest.raises((RuntimeError, MemoryError, OSError)) as caught:
            device.allocate(4 * MIB)
        assert device.is_out_of_memory(caught.value), flavour


def test_blocks_are_rounded_up() -> None:
    device = FakeDevice(10 * MIB, block_bytes=2 * MIB)
    assert device.allocate(1) == 2 * MIB and device.memory_free_bytes() == 8 * MIB


def test_holes_serve_what_fits_into_one_of_them_until_they_are_cleaned_up() -> None:
    device = FakeDevice(10 * MIB, fragments=True)
    blocks = [device.allocate(3 * MIB) for _ in range(3)]
    for block in blocks[:2]:
        device.release(block)
    assert device.memory_free_bytes() == 7 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate(5 * MIB)
    device.release(device.allocate(2 * MIB))  # into a hole of 3
    device.cleanup()
    assert device.allocate(5 * MIB) == 5 * MIB and device.memory_now_bytes() == 8 * MIB


def test_single_allocations_are_refused() -> None:
    device = FakeDevice(10 * MIB)
    device.allocate(1)
    device.refuse(2)
    device.allocate(1)
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate(1)
    device.allocate(1)


def test_tensors_are_counted_while_they_live() -> None:
    device = FakeDevice(10 * MIB)
    with device.watched():
        x = torch.zeros(MIB, dtype=torch.uint8)
        view = x[: MIB // 2]
        x.add_(1)
        assert device.used_bytes == MIB
        del x
        assert device.used_bytes == MIB, "the view holds it"
        del view
        assert device.used_bytes == 0
        y = torch.ones(MIB // 4, requires_grad=True)
        (y * 2).sum().backward()
        assert device.used_bytes == 2 * MIB  # y and its gradient
        assert device.peak_bytes > 2 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(11 * MIB, dtype=torch.uint8)
    assert y.grad is not None
    del y
    assert device.used_bytes == 0


def test_the_limit_is_kept() -> None:
    device = FakeDevice(10 * MIB)
    assert device.limit_memory(4 * MIB)
    with device.watched(), pytest.raises(torch.OutOfMemoryError):
        torch.zeros(5 * MIB, dtype=torch.uint8)


@pytest.mark.parametrize("device", [CpuDevice(), FakeDevice(MIB)])
def test_what_every_device_answers(device: Device) -> None:
    assert not device.multiplies_fp16()
    device.set_exact_fp32(True)
    device.synchronize()
    device.cleanup()
    device.reset_peak()
    assert device.memory_peak_bytes() == device.memory_now_bytes() == device.memory_idle_bytes() == 0
