"""A device of a chosen size that refuses memory as CUDA, MPS or the CPU would; it needs no such hardware."""

from __future__ import annotations

import torch

from devices.base import Device
from devices.cuda import CudaDevice
from devices.mps import MpsDevice

# What torch 2.9 to 2.13 say, with the size that was asked for.
OUT_OF_MEMORY = {
    "cuda": lambda size: torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU 0 has a total capacity of 8.00 GiB"
    ),
    "cuda driver": lambda size: RuntimeError("CUDA error: out of memory"),
    "cublas": lambda size: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "mps": lambda size: RuntimeError(
        "MPS backend out of memory (MPS allocated: 6.00 GB, other allocations: 384.00 KB, max allowed: 6.80 GB). "
        f"Tried to allocate {size / 2**20:.2f} MB on private pool."
    ),
    "mps buffer": lambda size: RuntimeError(f"Invalid buffer size: {size / 2**30:.2f} GB"),
    "cpu": lambda size: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        f"you tried to allocate {size} bytes. Error code 12 (Cannot allocate memory)"
    ),
    "windows": lambda size: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: "
        f"you tried to allocate {size} bytes."
    ),
    "c++": lambda size: RuntimeError("std::bad_alloc"),
    "python": lambda size: MemoryError(),
    "system": lambda size: OSError(12, "Cannot allocate memory"),
}


class FakeDevice(Device):
    """Counts what is taken from it; tensors themselves lie on the CPU.

    Args:
        capacity_bytes: what it can give; 0: no memory of its own, like the CPU.
        flavour: key of `OUT_OF_MEMORY`; what it raises when it is full.
        separate: whether its memory lies outside the RAM.
        block_bytes: every allocation is rounded up to this.
    """

    name = "fake"
    out_of_memory_words = CudaDevice.out_of_memory_words + MpsDevice.out_of_memory_words

    def __init__(
        self, capacity_bytes: int = 0, flavour: str = "cuda", separate: bool = True, block_bytes: int = 1
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.capacity_bytes, self.flavour, self.block_bytes = capacity_bytes, flavour, block_bytes
        self.is_separate_memory = separate and capacity_bytes > 0
        self.used_bytes = self.held_bytes = self.peak_bytes = self.cleanups = 0
        self.limit_bytes: int | None = None

    def allocate(self, size_bytes: int) -> int:
        """Take memory; idle blocks are used first. Returns what was taken, for `release`."""
        size = -(-size_bytes // self.block_bytes) * self.block_bytes
        if self.used_bytes + size > min(self.capacity_bytes, self.limit_bytes or self.capacity_bytes):
            raise OUT_OF_MEMORY[self.flavour](size_bytes)
        self.used_bytes += size
        self.held_bytes = max(self.held_bytes, self.used_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return size

    def release(self, size_bytes: int) -> None:
        """Give memory back to the device's cache, where it stays until `cleanup`."""
        self.used_bytes -= size_bytes

    def describe(self) -> str:
        return "fake device"

    def memory_now_bytes(self) -> int:
        return self.held_bytes

    def memory_idle_bytes(self) -> int:
        return self.held_bytes - self.used_bytes

    def memory_peak_bytes(self) -> int:
        return self.peak_bytes

    def reset_peak(self) -> None:
        self.peak_bytes = self.held_bytes

    def memory_total_bytes(self) -> int:
        return self.capacity_bytes

    def memory_free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def limit_memory(self, limit_bytes: int) -> bool:
        self.limit_bytes = limit_bytes
        return True

    def cleanup(self) -> None:
        self.cleanups += 1
        self.held_bytes = self.used_bytes

    def synchronize(self) -> None:
        return None
