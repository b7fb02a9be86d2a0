"""Copies of bytes between the machine's RAM and a device, while the device continues computing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Wait = Callable[[], object]


class Carrier:
    """Copies between the host and a device from a thread beside the computation; a call returns when the copy is done.

    This one is for devices without streams, where a copy waits for what was computed before it, and for tests.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_bytes(self, size: int) -> Tensor:
        """An uninitialised buffer (uint8) in host memory of the kind that is copied fastest."""
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> Wait:
        """A function that waits until the device has finished everything that was started before this call."""
        return lambda: None  # A device that computes in order has reached every point before a copy.

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy, and return when it is done; either `source` or `target` lies in host memory."""
        target.copy_(source)


class CudaCarrier(Carrier):
    """A `Carrier` that copies on a CUDA stream of its own, from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)

    def host_bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Wait:
        reached: Wait = torch.cuda.current_stream(self.device).record_event().synchronize
        return reached

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        self.stream.synchronize()
