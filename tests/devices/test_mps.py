from __future__ import annotations

import platform
import sys
import types

import pytest
import torch

import devices
from devices import mps
from devices.cpu import CpuDevice
from devices.inventory import look
from devices.mps import MpsDevice
from memory.observe import budget
from memory.observe.budget import Budget, Limit, margin_of, measure_budget
from settings.errors import UserError
from training.budget.planning import machine_of

GIB = 2**30
ONE = (1).to_bytes(4, sys.byteorder)
MACS = {  # platform.machine(), sysctl values
    "apple_silicon": ("arm64", {"hw.optional.arm64": ONE, "machdep.cpu.brand_string": b"Apple M4 Max\0"}),
    "rosetta": ("x86_64", {"sysctl.proc_translated": ONE, "machdep.cpu.brand_string": b"VirtualApple @ 2.50GHz\0"}),
    "intel": ("x86_64", {"machdep.cpu.brand_string": b"Intel(R) Core(TM) i7\0"}),
}


def mac(monkeypatch, kind, macos="15.1", brand=None):
    machine, values = MACS[kind]
    values = {**values, **({"machdep.cpu.brand_string": brand} if brand else {})}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), machine))
    monkeypatch.setattr(mps, "read_sysctl", values.get)


def torch_says(monkeypatch, built=True, available=True):
    asked = []
    backend = types.SimpleNamespace(
        is_built=lambda: asked.append("built") or built, is_available=lambda: asked.append("available") or available
    )
    monkeypatch.setattr(torch.backends, "mps", backend)
    return asked


@pytest.mark.parametrize("kind", MACS)
def test_macs_are_recognised_by_their_hardware(monkeypatch, kind):
    mac(monkeypatch, kind)
    assert mps.mac_hardware() == kind


def test_no_mac(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    asked = torch_says(monkeypatch)
    assert mps.mac_hardware() == "" and "Apple Silicon" in mps.why_missing() and asked == []


@pytest.mark.parametrize(("kind", "words"), [("intel", "Intel Mac"), ("rosetta", "arm64 Python")])
def test_torch_is_not_even_asked_on_intel_and_rosetta(monkeypatch, kind, words):
    mac(monkeypatch, kind)
    asked = torch_says(monkeypatch)
    assert words in mps.why_missing() and asked == []


def test_apple_silicon_needs_a_torch_and_macos_that_have_it(monkeypatch):
    mac(monkeypatch, "apple_silicon")
    torch_says(monkeypatch)
    assert mps.why_missing() == ""
    torch_says(monkeypatch, available=False)
    assert "macOS 12.3" in mps.why_missing()
    torch_says(monkeypatch, built=False)
    assert "no MPS" in mps.why_missing()
    monkeypatch.delattr(torch.backends, "mps")
    assert "no MPS" in mps.why_missing()


@pytest.mark.parametrize(
    ("brand", "macos", "expected"),
    [
        (b"Apple M1 Pro\0", "15.0", torch.float32),
        (b"Apple M2\0", "15.0", torch.float32),
        (b"Apple M3\0", "14.0", torch.bfloat16),
        (b"Apple M3\0", "13.6", torch.float32),
        (b"Apple M12 Ultra\0", "16.0", torch.bfloat16),
        (b"Apple processor\0", "15.0", torch.float32),
    ],
)
def test_bf16_where_the_chip_does_it_fast(monkeypatch, brand, macos, expected):
    mac(monkeypatch, "apple_silicon", macos, brand)
    device = MpsDevice()
    assert device.choose_compute_dtype("auto").dtype == expected
    machine = machine_of(device, Budget(GIB, GIB, GIB, (), "flag", 0), 0, 1)
    assert machine.multiplies_fast("bfloat16") == (expected == torch.bfloat16) and machine.speed_class == "mps"


@pytest.mark.parametrize(
    ("kind", "macos", "says", "expected"),
    [
        ("apple_silicon", "15.1", {}, "mps"),
        ("apple_silicon", "12.0", {"available": False}, "cpu"),
        ("apple_silicon", "15.1", {"built": False}, "cpu"),
        ("intel", "13.5", {}, "cpu"),
        ("rosetta", "15.1", {}, "cpu"),
    ],
)
def test_a_run_goes_where_the_hardware_allows_whatever_torch_claims(monkeypatch, kind, macos, says, expected):
    mac(monkeypatch, kind, macos)
    asked = torch_says(monkeypatch, **says)
    assert devices.pick().name == expected
    assert bool(asked) == (kind == "apple_silicon"), "MPS is not even asked for elsewhere"
    if expected == "cpu":
        with pytest.raises(UserError, match=r"--device = mps, is not here \(.+\); here: cpu"):
            devices.pick("mps")


@pytest.mark.parametrize("kind", ["intel", "rosetta"])
def test_the_doctor_does_not_touch_mps_either(monkeypatch, kind):
    mac(monkeypatch, kind)
    asked = torch_says(monkeypatch)
    monkeypatch.setattr(CpuDevice, "multiply_rate", lambda self, dtype: 1e11)
    monkeypatch.setattr(CpuDevice, "copy_rate", lambda self: 1e10)
    found = look()
    assert [device["name"] for device in found["devices"] if not device["missing"]] == ["cpu"]
    assert found["torch"]["mac"] == kind and asked == []


def test_the_budget_is_what_metal_recommends_and_the_host_can_give(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GIB)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 0)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 0)
    for available, expected in ((64 * GIB, 10 * GIB - margin_of(10 * GIB)), (4 * GIB, 4 * GIB - margin_of(4 * GIB))):
        monkeypatch.setattr(budget, "host_limits", lambda *args, size=available, **kw: [Limit("available RAM", size)])
        assert measure_budget("auto", MpsDevice()).device_bytes == expected


def test_metals_own_words_for_a_full_gpu():
    texts = (
        "MPS backend out of memory (MPS allocated: 6.00 GB)",
        "Invalid buffer size: 20.00 GB",
        "Failed to allocate private MTLBuffer for size 1234",
        "Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    )
    assert all(MpsDevice().is_out_of_memory(RuntimeError(text)) for text in texts)


def test_the_peak_is_kept_by_sampling(monkeypatch):
    mac(monkeypatch, "apple_silicon")
    held = {"driver": 2 * GIB, "tensors": GIB}
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: held["driver"])
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: held["tensors"])
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GIB)
    device = MpsDevice()
    assert (device.memory_now_bytes(), device.memory_idle_bytes()) == (2 * GIB, GIB)
    assert (device.memory_total_bytes(), device.memory_free_bytes()) == (10 * GIB, 9 * GIB)
    held["driver"] = GIB
    assert device.memory_now_bytes() == GIB and device.memory_peak_bytes() == 2 * GIB
    device.reset_peak()
    assert device.memory_peak_bytes() == GIB
    assert not device.is_separate_memory
    assert "M4 Max" in device.describe()


def test_the_limit_is_a_share_of_the_recommended_memory(monkeypatch):
    shares = []
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GIB)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", shares.append)
    assert MpsDevice().limit_memory(4 * GIB) and MpsDevice().limit_memory(40 * GIB)
    assert shares == [0.4, 1.0]


def test_sysctl_is_absent_elsewhere():
    if sys.platform != "darwin":
        assert mps.read_sysctl("hw.optional.arm64") is None
