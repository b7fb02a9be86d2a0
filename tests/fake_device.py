"""A device of a chosen size that refuses memory as CUDA, MPS or the CPU would; it needs no such hardware.

`allocate` and `release` count what a test says. Inside `with device.watched():` every tensor that torch makes is
counted by itself, so that a whole training step, or a whole run, meets the limits of a small GPU; the tensors lie on
the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from devices.base import Device
from devices.cuda import CudaDevice
from devices.mps import MpsDevice

# What torch 2.9 to 2.13 and pyarrow say, with the size that was asked for.
OUT_OF_MEMORY = {
    "cuda": lambda size: torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU 0 has a total capacity of 8.00 GiB"
    ),
    "cuda driver": lambda size: RuntimeError("CUDA error: out of memory"),
    "cuda segments": lambda size: RuntimeError("CUDA driver error: out of memory"),
    "cublas": lambda size: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": lambda size: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
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
    "arrow": lambda size: pa.ArrowMemoryError(f"malloc of size {size} failed"),
    "system": lambda size: OSError(12, "Cannot allocate memory"),
}


class FakeDevice(Device):
    """Counts what is taken from it; tensors themselves lie on the CPU.

    Args:
        capacity_bytes: what it can give; 0: no memory of its own, like the CPU.
        flavour: key of `OUT_OF_MEMORY`; what it raises when it is full.
        separate: whether its memory lies outside the RAM.
        name: as the program sees it; "cpu" where Accelerate has to take it for one.
    """

    out_of_memory_words = CudaDevice.out_of_memory_words + MpsDevice.out_of_memory_words

    def __init__(
        self,
        capacity_bytes: int = 0,
        flavour: str = "cuda",
        separate: bool = True,
        name: str = "fake",
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.capacity_bytes, self.flavour = capacity_bytes, flavour
        self.is_separate_memory = separate and capacity_bytes > 0
        self.name = name
        self.used_bytes = self.held_bytes = self.peak_bytes = self.cleanups = 0
        self.limit_bytes: int | None = None

    def allocate(self, size_bytes: int) -> int:
        """Take memory; idle blocks are used first. Returns what was taken, for `release`."""
        if self.used_bytes + size_bytes > min(self.capacity_bytes, self.limit_bytes or self.capacity_bytes):
            raise OUT_OF_MEMORY[self.flavour](size_bytes)
        self.used_bytes += size_bytes
        self.held_bytes = max(self.held_bytes, self.used_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return size_bytes

    def release(self, size_bytes: int) -> None:
        """Give memory back to the device's cache, where it stays until `cleanup`."""
        self.used_bytes -= size_bytes

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count every tensor that torch makes in this thread until the end of the block."""
        with _Watch(self):
            yield

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


class _Watch(TorchDispatchMode):
    """Tells a fake device of each new storage, and of its end."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and storage.nbytes():
            taken = self.device.allocate(storage.nbytes())
            self._known.add(key)
            weakref.finalize(storage, self._forget, key, taken)

    def _forget(self, key: int, taken: int) -> None:
        self._known.discard(key)
        self.device.release(taken)
