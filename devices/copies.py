"""Copies of tensors to the machine's RAM and back, while the device continues computing.

On CUDA the copies run on a stream of their own, into pinned memory, in the order in which they are asked for. What must
not overtake what is said by events, so that the device's memory is free again at a known place of the computation: with
`Tensor.record_stream` it would be free only when a copy has really ended, and a host that runs ahead of the device would
have asked for the memory of all tensors before the first was free. Elsewhere a copy is a copy, done at once.

Pinned memory is taken in slabs, because torch's own pool rounds every tensor up to a power of two. It is free again when the next
pass begins: what that parks is copied on the same stream, so after all that the last one has fetched.
Source: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution"; the order of events: torchtune's activation
offloading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from limits import SLAB_BYTES

ALIGNMENT = 512  # bytes; as torch's allocators
Wait = Callable[[], object]


@dataclass
class Parked:
    """A tensor on its way to the host or back.

    Args:
        host: its copy, or the place of it. device: itself, where it is (still, or already) there.
        event: the last copy of it that was started.
    """

    host: Tensor
    device: Tensor | None = None
    event: torch.cuda.Event | None = None


class HostCopies:
    """Copies to the host's memory and back, done at once: for devices without streams, and for tests."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = Pool(is_pinned=False)

    def park(self, tensor: Tensor) -> Parked:
        """Start copying to the host. The tensor stays valid until `release`."""
        parked = Parked(self.pool.take(tensor), tensor)
        parked.host.copy_(tensor)
        return parked

    def release(self, parked: Parked) -> None:
        """Let go of the tensor on the device; what is computed from here on may overwrite its memory."""
        parked.device = None

    def settle(self) -> None:
        """Let the computation wait for all copies, and take all host memory as free: before a pass."""
        self.pool.reset()

    def begin_fetch(self, parked: Parked) -> None:
        """Start copying back. No effect on one that is on the device."""
        if parked.device is None:
            parked.device = torch.empty_like(parked.host, device=self.device).copy_(parked.host)

    def fetch(self, parked: Parked) -> Tensor:
        """The tensor on the device; computation from here on sees it."""
        self.begin_fetch(parked)
        assert parked.device is not None
        return parked.device


class CudaCopies(HostCopies):
    """The same on a stream of its own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pool = Pool(is_pinned=True)
        self.stream = torch.cuda.Stream(device)

    def park(self, tensor: Tensor) -> Parked:
        self.stream.wait_stream(self._computing())  # the tensor must have been computed
        with torch.cuda.stream(self.stream):
            host = self.pool.take(tensor)
            host.copy_(tensor, non_blocking=True)
            return Parked(host, tensor, self.stream.record_event())

    def release(self, parked: Parked) -> None:
        if parked.event is not None:
            self._computing().wait_event(parked.event)
        parked.device = None

    def settle(self) -> None:
        self._computing().wait_stream(self.stream)
        super().settle()

    def begin_fetch(self, parked: Parked) -> None:
        if parked.device is not None:
            return
        parked.device = torch.empty_like(parked.host, device=self.device)
        self.stream.wait_stream(self._computing())  # its memory may be in use by what was computed before
        with torch.cuda.stream(self.stream):
            parked.device.copy_(parked.host, non_blocking=True)
            parked.event = self.stream.record_event()

    def fetch(self, parked: Parked) -> Tensor:
        self.begin_fetch(parked)
        assert parked.device is not None and parked.event is not None
        self._computing().wait_event(parked.event)
        return parked.device

    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)


class Carrier:
    """Copies between the host and a device from a thread beside the computation; a call returns when the copy is done.

    This one is for devices without streams, where a copy waits for what was computed before it, and for tests.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host_bytes(self, size: int) -> Tensor:
        """Bytes (uint8) on the host that copies are fast from."""
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> Wait:
        """The place that the computation has been told of so far; calling what comes back waits until it is reached."""
        return lambda: None  # a device that computes in order has reached every place before a copy

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy; of source and target one lies on the host."""
        target.copy_(source)


class CudaCarrier(Carrier):
    """The same on a stream of its own, from and to pinned memory."""

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


class Pool:
    """Host memory in slabs, which are filled one after the other and kept from pass to pass.

    Memory: the most that was ever taken, rounded up to slabs.
    """

    def __init__(self, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        self.slabs: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """Take all memory as free."""
        self._slab = self._used = 0  # the slab that is being filled, and the bytes taken of it

    def take(self, like: Tensor) -> Tensor:
        """A contiguous tensor of the same shape and dtype on the host, not filled."""
        size = -(-max(like.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        while self._slab < len(self.slabs) and self._used + size > self.slabs[self._slab].numel():
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(self.slabs):
            self.slabs.append(torch.empty(max(SLAB_BYTES, size), dtype=torch.uint8, pin_memory=self.is_pinned))
        start, self._used = self._used, self._used + size
        return self.slabs[self._slab][start : start + like.nbytes].view(like.dtype).view(like.shape)
