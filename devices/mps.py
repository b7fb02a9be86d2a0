"""How is the GPU of an Apple Silicon Mac used as a device, and which Macs have one?

Idea: torch may claim MPS on Intel Macs and under Rosetta, where it hangs or gives wrong numbers; so the hardware is
asked first, through sysctl in this very process, and only then torch. What follows from how MPS works:

- It shares the machine's RAM: pinning would only copy, loader processes would only take memory from it, and its budget is
  the smaller of `recommended_max_memory` and what the host may give.
- It keeps compiled graphs and a pool of buffers for each shape that it has met, and gives nothing back by itself (reports
  of 72 GB of pool for 6.7 GB of tensors): tokens of a micro-batch are filled up to a multiple of 64 (`engine.micro_batches`),
  attention works in tiles whose few buffers are small, and `memory.cleanup` empties the pool by schedule.
- It counts no peak, so the samples of `memory.observe.monitor` do.
- Its limit may exceed the RAM, so that the machine swaps where an error would help: `devices.environment` lowers it.
Source: PyTorch issues 132596 and 152550 (growth with shapes), 119641 (bf16); "MPS environment variables".
"""

from __future__ import annotations

import ctypes
import platform
import re
import sys

import torch

from devices.base import Device

BF16_MACOS = 14  # the first macOS whose MPS has bfloat16
BF16_CHIP = 3  # M1 and M2 emulate bfloat16: it saves memory there, no time
# Nominal FLOP/s of fp32 products of a plain chip, and what Pro, Max and Ultra have of its units: a guess, not measured.
PLAIN_RATE = 2.5e12
CHIP_FACTORS = {"Pro": 2.0, "Max": 4.0, "Ultra": 8.0}
BF16_FACTOR, EMULATED_FACTOR = 1.3, 0.7  # of the rate of fp32


def read_sysctl(name: str) -> bytes | None:
    """Read one value of the kernel, or None where there is none of that name."""
    try:
        query = ctypes.CDLL(None).sysctlbyname
    except (OSError, TypeError, AttributeError):  # Windows; Linux
        return None
    buffer, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    if query(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return buffer.raw[: size.value]


def _sysctl_flag(name: str) -> bool:
    value = read_sysctl(name)
    return value is not None and int.from_bytes(value, sys.byteorder) == 1


def mac_hardware() -> str:
    """Recognise the machine: "apple_silicon", "rosetta" (translated process), "intel", or "" where this is no Mac."""
    if sys.platform != "darwin":
        return ""
    if _sysctl_flag("sysctl.proc_translated"):
        return "rosetta"
    if platform.machine() == "arm64":
        return "apple_silicon"
    return "rosetta" if _sysctl_flag("hw.optional.arm64") else "intel"


def _brand() -> str:
    """The chip's name, such as "Apple M4 Max"; empty where there is none."""
    return (read_sysctl("machdep.cpu.brand_string") or b"").decode(errors="replace").strip("\0")


def chip_generation() -> int:
    """The number after the M of the chip's name; 0 where it has none."""
    match = re.search(r"Apple M(\d+)", _brand())
    return int(match.group(1)) if match else 0


def why_missing() -> str:
    """Say why MPS cannot be used here; empty where it can. Asks torch on Apple Silicon only."""
    reasons = {
        "": "MPS needs a Mac with Apple Silicon",
        "intel": "this is an Intel Mac; MPS needs Apple Silicon",
        "rosetta": "this Python runs under Rosetta; install an arm64 Python to use MPS",
    }
    hardware = mac_hardware()
    if hardware in reasons:
        return reasons[hardware]
    backend = getattr(torch.backends, "mps", None)
    if backend is None or not backend.is_built():
        return "this build of torch has no MPS"
    return "" if backend.is_available() else "torch finds MPS unusable; it needs macOS 12.3 or later"


def count() -> None:
    """All processes share it."""
    return None


def make(index: int) -> MpsDevice:
    """The device of a process."""
    return MpsDevice()


class MpsDevice(Device):
    """The GPU of an Apple Silicon Mac; its memory is a share of the RAM."""

    name = "mps"
    largest_side = 2048
    speed_class = "mps"
    threads = 1
    out_of_memory_words = (
        "mps backend out of memory",
        "invalid buffer size",
        "kiogpucommandbuffercallbackerroroutofmemory",
        "failed to allocate private mtlbuffer",
    )

    def __init__(self) -> None:
        super().__init__(torch.device("mps"))
        self._peak_bytes = 0

    def describe(self) -> str:
        return f"MPS ({_brand() or 'Apple GPU'}, macOS {platform.mac_ver()[0]})"

    def memory_now_bytes(self) -> int:
        now = torch.mps.driver_allocated_memory()
        self._peak_bytes = max(self._peak_bytes, now)
        return now

    def memory_idle_bytes(self) -> int:
        return max(0, torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory())

    def memory_peak_bytes(self) -> int:
        """The most that was seen; MPS counts no peak, so this is as good as the sampling of `memory.observe.monitor`."""
        self.memory_now_bytes()
        return self._peak_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = torch.mps.driver_allocated_memory()

    def memory_total_bytes(self) -> int:
        return torch.mps.recommended_max_memory()

    def memory_free_bytes(self) -> int:
        return max(0, self.memory_total_bytes() - torch.mps.current_allocated_memory())

    def limit_memory(self, limit_bytes: int) -> bool:
        torch.mps.set_per_process_memory_fraction(min(1.0, limit_bytes / self.memory_total_bytes()))
        return True

    def cleanup(self) -> None:
        torch.mps.empty_cache()

    def synchronize(self) -> None:
        torch.mps.synchronize()

    @property
    def computes_on(self) -> str:
        return _brand()

    def nominal_rate(self, dtype: torch.dtype) -> float:
        units = next((factor for word, factor in CHIP_FACTORS.items() if word in _brand()), 1.0)
        narrow = BF16_FACTOR if torch.bfloat16 in self.fast_dtypes() else EMULATED_FACTOR
        return PLAIN_RATE * units * {torch.float32: 1.0, torch.bfloat16: narrow}.get(dtype, 0.0)

    def fast_dtypes(self) -> tuple[torch.dtype, ...]:
        macos = int((platform.mac_ver()[0] or "0").split(".")[0])
        if macos >= BF16_MACOS and chip_generation() >= BF16_CHIP:
            return (torch.bfloat16, torch.float32)
        return (torch.float32,)
