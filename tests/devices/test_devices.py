"""Which device is taken, and what CPU, CUDA and MPS answer; the hardware is a fake."""

from __future__ import annotations

import platform
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import devices
from devices import mps, processor
from devices.base import Device
from devices.choose import passed_over
from devices.cpu import CpuDevice
from devices.cuda import CudaDevice
from devices.mps import MpsDevice
from devices.processor import AVX2, AVX512_BF16, Processor
from memory import budget
from memory.budget import Budget, measure_budget
from memory.system_limits import Limit, margin_of
from settings.errors import UserError
from tests.fake_device import OUT_OF_MEMORY
from training.setup.plan import machine_of

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
GIB = 2**30
BUDGET = Budget(GIB, GIB, GIB, (), "flag", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A GPU of 8 GiB: 5 free, 2 held by us of which 1.5 in tensors, 1 by others."""
    answers = {
        "set_device": None,
        "memory_reserved": 2 * GIB,
        "memory_allocated": 3 * GIB // 2,
        "max_memory_reserved": 3 * GIB,
        "mem_get_info": (5 * GIB, 8 * GIB),
        "get_device_name": "NVIDIA Test",
        "is_available": True,
        "device_count": 2,
        "get_device_capability": (8, 6),
        "get_arch_list": ["sm_75", "sm_80", "sm_90a", "compute_120"],
        "get_device_properties": SimpleNamespace(multi_processor_count=100),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    return CudaDevice(1)


ONE = (1).to_bytes(4, sys.byteorder)
MACS = {  # platform.machine(), sysctl values
    "apple_silicon": ("arm64", {"hw.optional.arm64": ONE, "machdep.cpu.brand_string": b"Apple M4 Max\0"}),
    "intel": ("x86_64", {"machdep.cpu.brand_string": b"Intel(R) Core(TM) i7\0"}),
    "rosetta": ("x86_64", {"sysctl.proc_translated": ONE, "machdep.cpu.brand_string": b"VirtualApple @ 2.50GHz\0"}),
}


def become_mac(
    patch: pytest.MonkeyPatch, kind: str, macos: str = "15.1", brand: bytes = b"", built: bool = True
) -> list[str]:
    """Let this be a Mac; gives what torch is asked of MPS."""
    (machine, values) = MACS[kind]
    questions = list[str]()
    values = {**values, **({"machdep.cpu.brand_string": brand} if brand else {})}
    patch.setattr(sys, "platform", "darwin")
    patch.setattr(platform, "machine", lambda: machine)
    patch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), machine))
    patch.setattr(mps, "read_sysctl", lambda name: values.get(name, b""))
    backend = types.SimpleNamespace(
        is_built=lambda: questions.append("built") or built, is_available=lambda: questions.append("available") or True
    )
    patch.setattr(torch.backends, "mps", backend)
    return questions


def test_a_gpu_is_taken_first_and_each_local_rank_has_its_own(gpu: CudaDevice) -> None:
    assert str(devices.pick("auto", 1).torch_device) == "cuda:1" and devices.pick("cpu").name == "cpu"
    with pytest.raises(UserError, match="--num_processes"):
        devices.pick("auto", 2)
    with pytest.raises(UserError, match="--device = tpu"):
        devices.pick("tpu")


@pytest.mark.parametrize(("capability", "is_taken"), [((6, 1), False), ((8, 9), True), ((10, 0), False)])
def test_a_card_that_this_torch_has_no_kernels_for_is_passed_over(
    gpu: CudaDevice, capability: tuple[int, int], is_taken: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    assert (devices.pick().name == "cuda") == is_taken
    if is_taken:
        return
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    (note,) = passed_over("auto", devices.pick(), tmp_path)
    assert "NVIDIA Test" in note and "cu126" in note
    with pytest.raises(UserError, match=r"--device = cuda, is not here.*cu126"):
        devices.pick("cuda")


@pytest.mark.parametrize(
    ("kind", "built", "expected"),
    [("apple_silicon", True, "mps"), ("apple_silicon", False, "cpu"), ("intel", True, "cpu"), ("rosetta", True, "cpu")],
)
def test_mps_is_taken_where_the_hardware_has_it_whatever_torch_claims(
    monkeypatch: pytest.MonkeyPatch, kind: str, built: bool, expected: str
) -> None:
    questions = become_mac(monkeypatch, kind, built=built)
    assert mps.mac_hardware() == kind and devices.pick().name == expected
    assert bool(questions) == (kind == "apple_silicon"), "torch hangs or gives wrong numbers when it is asked elsewhere"
    if expected == "cpu":
        with pytest.raises(UserError, match="--device = mps, is not here"):
            devices.pick("mps")


# --- memory


def test_a_gpu_counts_cached_blocks_and_its_limit_is_a_share_of_the_card(
    gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (gpu.memory_now_bytes(), gpu.memory_idle_bytes(), gpu.memory_peak_bytes()) == (2 * GIB, GIB // 2, 3 * GIB)
    assert (gpu.memory_total_bytes(), gpu.memory_free_bytes()) == (8 * GIB, 5 * GIB + GIB // 2)
    questions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: questions.append(share))
    assert gpu.limit_memory(2 * GIB) and questions == [0.25]


def test_a_mac_keeps_its_peak_by_sampling_and_its_budget_below_metal_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"driver": 2 * GIB}
    shares = list[float]()
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: sizes["driver"])
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: GIB)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GIB)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", shares.append)
    device = MpsDevice()
    assert (device.memory_now_bytes(), device.memory_idle_bytes(), device.memory_free_bytes()) == (
        2 * GIB,
        GIB,
        9 * GIB,
    )
    sizes["driver"] = GIB
    assert device.memory_now_bytes() == GIB and device.memory_peak_bytes() == 2 * GIB
    device.reset_peak()
    assert device.memory_peak_bytes() == GIB
    assert device.limit_memory(4 * GIB) and device.limit_memory(40 * GIB) and shares == [0.4, 1.0]
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 0)
    for available, most in ((64 * GIB, 10 * GIB), (4 * GIB, 4 * GIB)):
        monkeypatch.setattr(budget, "host_limits", lambda *args, size=available, **kw: [Limit("available RAM", size)])
        assert measure_budget("auto", MpsDevice()).device_bytes == most - margin_of(most)


HOST_WORDS = {"cpu", "windows", "c++", "python", "arrow", "system", "cuda"}  # torch's own class says "cuda" everywhere


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (CpuDevice, set()),
        (CudaDevice, {"cuda driver", "cuda segments", "cublas", "cudnn"}),
        (MpsDevice, {"mps", "mps buffer"}),
    ],
)
def test_each_backend_recognises_its_own_out_of_memory_and_the_hosts(kind: type[Device], own: set[str]) -> None:
    device = kind.__new__(kind)
    assert {name for name, make in OUT_OF_MEMORY.items() if device.is_out_of_memory(make(GIB))} == own | HOST_WORDS


# --- dtypes and speed


@pytest.mark.parametrize(
    ("kind", "requested", "dtype", "as_requested"),
    [
        (AVX512_BF16, "auto", BF16, True),
        (AVX512_BF16, "fp16", BF16, False),
        (AVX2, "bf16", FP32, False),
    ],
)
def test_the_class_decides_the_dtype_whatever_is_measured(
    monkeypatch: pytest.MonkeyPatch, kind: Processor, requested: str, dtype: torch.dtype, as_requested: bool
) -> None:
    monkeypatch.setattr(processor, "here", lambda: kind)
    monkeypatch.setattr(Device, "multiply_rate", lambda self, dtype: pytest.fail("nothing may be measured"))
    choice = CpuDevice().choose_compute_dtype(requested)
    assert (choice.dtype, choice.as_requested) == (dtype, as_requested)


@pytest.mark.parametrize(
    ("name", "capability", "bf16", "fast", "auto"),
    [
        ("Tesla T4", (7, 5), False, {"float16"}, FP16),
        ("GeForce GTX 1660", (7, 5), False, set(), FP32),
        ("H100", (9, 0), True, {"float16", "bfloat16"}, BF16),
    ],
)
def test_the_capability_of_a_card_decides_the_dtype(
    gpu: CudaDevice,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: tuple[int, int],
    bf16: bool,
    fast: set[str],
    auto: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {name}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    machine = machine_of(gpu, BUDGET, 0, 1)
    assert {dtype for dtype, _ in machine.rates if machine.multiplies_fast(dtype)} == fast
    assert gpu.choose_compute_dtype().dtype == auto
    assert gpu.choose_compute_dtype("bf16").dtype == (BF16 if bf16 else FP32)
    assert (gpu.choose_compute_dtype("fp16").dtype == FP16) == ("float16" in fast)
    assert machine.rate("float32") >= 1e13 and machine.speed_class == "cuda" and machine.measured == ()


@pytest.mark.parametrize(
    ("brand", "macos", "expected"),
    [(b"Apple M2\0", "15.0", FP32), (b"Apple M3\0", "14.0", BF16), (b"Apple M3\0", "13.6", FP32)],
)
def test_the_chip_and_the_system_of_a_mac_decide_the_dtype(
    monkeypatch: pytest.MonkeyPatch, brand: bytes, macos: str, expected: torch.dtype
) -> None:
    become_mac(monkeypatch, "apple_silicon", macos, brand)
    assert MpsDevice().choose_compute_dtype("auto").dtype == expected
    assert machine_of(MpsDevice(), BUDGET, 0, 1).multiplies_fast("bfloat16") == (expected == BF16)
