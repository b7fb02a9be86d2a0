from __future__ import annotations

import pytest
import torch

from devices import cuda
from devices.base import Device
from devices.cuda import CudaDevice
from memory.observe.budget import Budget
from training.budget.planning import machine_of

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 8 GiB: 5 free, 2 held by us of which 1.5 in tensors, 1 by others."""
    answers = {
        "set_device": None,
        "memory_reserved": 2 * GIB,
        "memory_allocated": 3 * GIB // 2,
        "max_memory_reserved": 3 * GIB,
        "max_memory_allocated": 5 * GIB // 2,
        "mem_get_info": (5 * GIB, 8 * GIB),
        "get_device_name": "NVIDIA Test",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    return CudaDevice(1)


def test_memory_figures_count_cached_blocks(gpu):
    assert (gpu.memory_now_bytes(), gpu.memory_idle_bytes(), gpu.memory_peak_bytes()) == (2 * GIB, GIB // 2, 3 * GIB)
    assert gpu.tensors_peak_bytes() == 5 * GIB // 2
    assert (gpu.memory_total_bytes(), gpu.memory_free_bytes()) == (8 * GIB, 5 * GIB + GIB // 2)
    assert gpu.is_separate_memory and gpu.describe() == "cuda:1 (NVIDIA Test)"


def test_the_limit_is_a_share_of_the_card(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: asked.append(share))
    assert gpu.limit_memory(2 * GIB) and asked == [0.25]


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bf16_where_the_card_has_it(gpu, monkeypatch, native, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    assert gpu.choose_compute_dtype("auto").dtype == expected


@pytest.mark.parametrize(("capability", "fast"), [((6, 1), False), ((7, 0), True), ((7, 5), True), ((9, 0), True)])
def test_fp16_is_fast_from_volta_on(gpu, monkeypatch, capability, fast):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert gpu.multiplies_fp16() == fast


@pytest.mark.parametrize(
    ("capability", "bf16", "fast"),
    [
        ((6, 1), False, set()),
        ((7, 5), False, {"float16"}),
        ((8, 0), True, {"float16", "bfloat16"}),
        ((8, 9), True, {"float16", "bfloat16"}),
        ((9, 0), True, {"float16", "bfloat16"}),
        ((12, 0), True, {"float16", "bfloat16"}),
    ],
)
def test_the_capability_decides_what_the_plan_computes_in(gpu, monkeypatch, capability, bf16, fast):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    sizes = type("Properties", (), {"multi_processor_count": 100})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    monkeypatch.setattr(Device, "multiply_rate", lambda self, dtype: pytest.fail("nothing may be measured"))
    budget = Budget(GIB, GIB, GIB, (), "flag", 0)
    machine = machine_of(gpu, budget, 0, 1)
    assert {name for name, _ in machine.rates if machine.multiplies_fast(name)} == fast
    assert machine.rate("float32") >= 1e13 and machine.speed_class == "cuda" and machine.measured == ()


@pytest.mark.parametrize(("exact", "word"), [(True, "highest"), (False, "high")])
def test_tf32_is_taken_unless_fp32_itself_is_asked_for(gpu, monkeypatch, exact, word):
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    gpu.set_exact_fp32(exact)
    assert asked == [word]


def test_measuring_a_rate_leaves_neither_blocks_nor_a_peak(gpu, monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: done.append("peak reset"))
    monkeypatch.setattr(Device, "_measure_rate", lambda self, dtype: done.append(str(dtype)) or 1e13)
    assert gpu.multiply_rate(torch.float32) == gpu.multiply_rate(torch.float32) == 1e13
    assert done == ["torch.float32", "emptied", "peak reset"]


def test_tensors_of_another_card_are_strays(gpu):
    with pytest.raises(RuntimeError, match="w on cpu"):
        gpu.check_placement([("w", torch.zeros(1))])


def test_missing_says_why(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "no CUDA" in cuda.why_missing()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "driver or GPU" in cuda.why_missing()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cuda.why_missing() == ""


@pytest.mark.cuda
@pytest.mark.skipif(bool(cuda.why_missing()), reason="no CUDA device here")
def test_a_real_card():
    device = CudaDevice(0)
    device.cleanup()
    device.reset_peak()
    before = device.memory_now_bytes()
    held = torch.zeros(64 * 2**20, dtype=torch.uint8, device=device.torch_device)
    assert device.memory_now_bytes() - before >= held.nbytes and device.memory_peak_bytes() >= device.memory_now_bytes()
    device.check_placement([("held", held)])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=device.torch_device)
    assert device.is_out_of_memory(caught.value)
    del held
    device.cleanup()
    assert device.memory_now_bytes() == before and device.multiply_rate(torch.float32) > 0
