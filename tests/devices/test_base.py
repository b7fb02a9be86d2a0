from __future__ import annotations

import time

import pytest
import torch

from devices import base, processor
from devices.base import FIRST_SIDE, LAST_SIDE, LONG_SECONDS
from devices.cpu import CpuDevice
from devices.cuda import CudaDevice
from devices.mps import MpsDevice
from devices.processor import AMX_BF16, ARM_PLAIN, AVX2, AVX512_BF16
from settings.errors import UserError
from tests.fake_device import OUT_OF_MEMORY, FakeDevice

BF16, FP32 = torch.bfloat16, torch.float32


class Timed(CpuDevice):
    """A CPU whose products take as long as the test says: dtype -> operations a second."""

    def __init__(self, rates):
        super().__init__()
        self.rates, self.sides = rates, []

    def _time_product(self, square):
        self.sides.append(square.shape[0])
        return 2 * square.shape[0] ** 3 / self.rates[square.dtype]


def test_a_slow_dtype_is_measured_with_tiny_products_only():
    device = Timed({BF16: 0.3e9})
    assert device.multiply_rate(BF16) == pytest.approx(0.3e9)
    side = max(device.sides)
    assert side < LAST_SIDE and 2 * (side // 2) ** 3 / 0.3e9 < LONG_SECONDS


def test_a_disturbed_product_does_not_spoil_the_measurement():
    device = Timed({FP32: 1e11})
    quiet, calls = device._time_product, []

    def disturbed(square):  # another program takes the processor in two of three products
        calls.append(1)
        return quiet(square) + (0.02 if len(calls) % 3 else 0.0)

    device._time_product = disturbed
    assert device.multiply_rate(FP32) == pytest.approx(1e11)


def test_waiting_for_a_busy_machine_is_not_taken_for_a_slow_dtype():
    device = Timed({FP32: 1e11, BF16: 3e9})
    undisturbed = device._time_product
    device._time_product = lambda square: undisturbed(square) + 0.013  # in every product a thread waits for its core
    assert device.multiply_rate(FP32) > 5e10


def test_a_fast_dtype_is_measured_with_a_large_product_and_once():
    device = Timed({FP32: 3e12})
    assert device.multiply_rate(FP32) == device.multiply_rate(FP32) == pytest.approx(3e12)
    assert device.sides[0] == FIRST_SIDE and device.sides.count(LAST_SIDE) >= 3


@pytest.mark.parametrize("measured", [{BF16: 1e6, FP32: 1e12}, {BF16: 1e12, FP32: 1e6}], ids=["slow", "fast"])
@pytest.mark.parametrize(
    ("kind", "requested", "dtype", "as_requested"),
    [
        (AVX512_BF16, "auto", BF16, True),
        (AVX512_BF16, "bf16", BF16, True),
        (AVX512_BF16, "no", FP32, True),
        (AVX512_BF16, "fp16", BF16, False),
        (AVX2, "auto", FP32, True),
        (AVX2, "bf16", FP32, False),
        (AVX2, "fp16", FP32, False),
        (AMX_BF16, "auto", BF16, True),
        (ARM_PLAIN, "auto", FP32, True),
    ],
)
def test_compute_dtype_follows_the_class_whatever_is_measured(
    monkeypatch, kind, requested, dtype, as_requested, measured
):
    monkeypatch.setattr(processor, "here", lambda: kind)
    device = Timed(measured)
    device.multiply_rate(BF16), device.multiply_rate(FP32)
    choice = device.choose_compute_dtype(requested)
    assert (choice.dtype, choice.as_requested) == (dtype, as_requested)
    assert ("bf16" if dtype == BF16 else "fp32") in choice.reason


def test_the_first_products_are_run_in_every_dtype_and_slow_ones_are_tiny(monkeypatch):
    sides = []
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: sides.append((a.dtype, a.shape[0])))
    for kind in (AVX2, AVX512_BF16):
        monkeypatch.setattr(processor, "here", lambda kind=kind: kind)
        CpuDevice().warm_up()
    all_sides = [FIRST_SIDE * 2**n for n in range(5)]
    wide, narrow = [(FP32, side) for side in all_sides], [(BF16, side) for side in all_sides]
    assert all_sides[-1] == LAST_SIDE
    assert sides == [*wide, narrow[0], *wide, *narrow]


def test_the_real_cpu_answers():
    device = CpuDevice()
    start = time.thread_time()
    assert device.fast_dtypes()[-1] == FP32 and device.multiply_rate(FP32) > 1e6
    assert time.thread_time() - start < 30  # far above any sane machine; a runaway measurement would exceed it
    assert (device.memory_total_bytes(), device.memory_now_bytes(), device.is_separate_memory) == (0, 0, False)
    assert "CPU" in device.describe() and not device.limit_memory(1)


def bare(kind):
    """A device object without its hardware."""
    return kind.__new__(kind)


HOST = {"cpu", "windows", "c++", "python", "arrow", "system"}


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (CpuDevice, set()),
        (CudaDevice, {"cuda driver", "cuda segments", "cublas", "cudnn"}),
        (MpsDevice, {"mps", "mps buffer"}),
    ],
)
def test_each_backend_recognises_its_own_words_and_the_hosts(kind, own):
    recognised = {name for name, make in OUT_OF_MEMORY.items() if bare(kind).is_out_of_memory(make(2**30))}
    assert recognised == own | HOST | {"cuda"}  # torch's own class says it on every device


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        ValueError("CUDA out of memory"),
        UserError("not enough memory: you tried to allocate"),
        OSError(28, "No space left on device"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not_taken_for_it(error):
    assert not FakeDevice().is_out_of_memory(error)


def test_the_cause_of_an_error_is_looked_at():
    try:
        try:
            raise MemoryError
        except MemoryError as cause:
            raise RuntimeError("worker failed") from cause
    except RuntimeError as error:
        assert FakeDevice().is_out_of_memory(error)
        assert error.__cause__ is not None
        error.__cause__.__cause__ = error  # a circle must end
        assert FakeDevice().is_out_of_memory(error)


def test_stray_tensors_are_named():
    device = CpuDevice()
    here, away = torch.zeros(1), torch.zeros(1, device="meta")
    device.check_placement([("a", here)])
    with pytest.raises(RuntimeError, match="bias on meta, w1 on meta, w2 on meta and 1 more"):
        device.check_placement([("a", here), ("bias", away), ("w1", away), ("w2", away), ("w3", away)])


def test_copies_are_timed_and_the_best_time_counts(monkeypatch):
    clock = iter([0.0, 0.5, 1.0, 1.01, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5])
    monkeypatch.setattr(base.time, "perf_counter", lambda: next(clock))
    assert CpuDevice().copy_rate() == pytest.approx(2 * base.COPIED_BYTES / 0.01)


def test_placing_a_tensor_where_it_is_copies_nothing():
    tensor = torch.arange(5)
    assert base.place(tensor, torch.device("cpu")) is tensor


def test_placing_on_a_gpu_goes_through_pinned_memory_and_waits_for_nothing():
    asked = []

    class Told(torch.Tensor):
        def pin_memory(self):
            asked.append("pinned")
            return self

        def to(self, where, non_blocking=False):
            asked.append((str(where), non_blocking))
            return self

    base.place(torch.arange(5).as_subclass(Told), torch.device("cuda", 1))
    assert asked == ["pinned", ("cuda:1", True)]
