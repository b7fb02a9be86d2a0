"""The GPU of an Apple Silicon Mac as a device, and which Macs have one.

Torch may claim MPS on Intel Macs and under Rosetta, where it hangs or gives wrong numbers; so the hardware is
asked first, through sysctl in this very process, and only then torch. What follows from how MPS works:

- It shares the machine's RAM: pinning would only copy, loader processes would only take memory from it, and its budget
  is the smaller of `recommended_max_memory` and what the host may give.
- It keeps compiled graphs and a pool of buffers for each shape that it has met, and gives nothing back by itself
  (reports of 72 GB of pool for 6.7 GB of tensors): tokens of a micro-batch, lengths and rows of a group of attention
  come from small sets of sizes (`devices.sizes`), and `memory.cleanup` empties the pool by schedule.
- It counts no peak, so the samples of `memory.monitor` do.
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
from support.language import say

BF16_MACOS = 14  # the first macOS whose MPS has bfloat16
BF16_CHIP = 3  # M1 and M2 emulate bfloat16: it saves memory there, no time
# Nominal FLOP/s of fp32 products of a plain chip, and what Pro, Max and Ultra have of its units: a guess, not measured.
PLAIN_RATE = 2.5e12
CHIP_FACTORS = {"Pro": 2.0, "Max": 4.0, "Ultra": 8.0}
# Both are shares of the rate of fp32.
BF16_FACTOR = 1.3
EMULATED_FACTOR = 0.7


def read_sysctl(name: str) -> bytes:
    """Read one value of the kernel; empty where there is none of that name."""
    try:
        query = ctypes.CDLL(None).sysctlbyname
    except (OSError, TypeError, AttributeError):  # Windows; Linux
        return b""
    buffer = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(256)
    if query(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return b""
    return buffer.raw[: size.value]


def mac_hardware() -> str:
    """Recognise the machine: "apple_silicon", "rosetta" (translated process), "intel", or "" where this is no Mac."""
    if sys.platform != "darwin":
        return ""
    is_arm = platform.machine() == "arm64"
    if _is_set("sysctl.proc_translated") or (_is_set("hw.optional.arm64") and not is_arm):
        return "rosetta"
    return "apple_silicon" if is_arm else "intel"


def _is_set(name: str) -> bool:
    return int.from_bytes(read_sysctl(name), sys.byteorder) == 1


def _brand() -> str:
    """The chip's name, such as "Apple M4 Max"; empty where there is none."""
    return read_sysctl("machdep.cpu.brand_string").decode(errors="replace").strip("\0")


class MpsDevice(Device):
    """The GPU of an Apple Silicon Mac; its memory is a share of the RAM."""

    name = "mps"
    supports_several_processes = False  # No backend of torch.distributed sums tensors that lie on it.
    largest_side = 2048
    speed_class = "mps"
    threads = 1
    out_of_memory_words = (
        "mps backend out of memory",
        "invalid buffer size",
        "kiogpucommandbuffercallbackerroroutofmemory",
        "failed to allocate private mtlbuffer",
    )

    def __init__(self, index: int = 0) -> None:
        super().__init__(torch.device("mps"))
        self._peak_bytes = 0

    @classmethod
    def why_missing(cls) -> str:
        reasons = {
            "": say("MPS needs a Mac with Apple Silicon"),
            "intel": say("this is an Intel Mac; MPS needs Apple Silicon"),
            "rosetta": say("this Python runs under Rosetta; install an arm64 Python to use MPS"),
        }
        hardware = mac_hardware()
        if hardware in reasons:
            return reasons[hardware]
        if not torch.backends.mps.is_built():
            return say("this build of torch has no MPS")
        return (
            "" if torch.backends.mps.is_available() else say("torch finds MPS unusable; it needs macOS 12.3 or later")
        )

    def describe(self) -> str:
        return f"MPS ({_brand() or 'Apple GPU'}, macOS {platform.mac_ver()[0]})"

    def memory_now_bytes(self) -> int:
        now = torch.mps.driver_allocated_memory()
        self._peak_bytes = max(self._peak_bytes, now)
        return now

    def memory_idle_bytes(self) -> int:
        return max(0, torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory())

    def memory_peak_bytes(self) -> int:
        """The most that was seen; MPS counts no peak, so this is as good as the sampling of `memory.monitor`."""
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
        chip = re.search(r"Apple M(\d+)", _brand())
        if macos >= BF16_MACOS and chip and int(chip[1]) >= BF16_CHIP:
            return (torch.bfloat16, torch.float32)
        return (torch.float32,)
