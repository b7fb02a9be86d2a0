"""How is the CPU used as a device? Its tensors are in the process's own RAM, which `memory.observe.monitor` counts."""

from __future__ import annotations

import torch

from devices.base import Device
from language import join
from settings.fields import counted


def why_missing() -> str:
    """There always is one."""
    return ""


def count() -> None:
    """All processes share it."""
    return None


def make(index: int) -> CpuDevice:
    """The device of a process."""
    return CpuDevice()


class CpuDevice(Device):
    """The CPU. It has no memory of its own: all figures are 0, host memory tells everything."""

    name = "cpu"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def describe(self) -> str:
        return join(", ", ["CPU", counted(torch.get_num_threads(), "thread")])

    def memory_now_bytes(self) -> int:
        return 0

    def memory_idle_bytes(self) -> int:
        return 0

    def memory_peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        return None

    def memory_total_bytes(self) -> int:
        return 0

    def memory_free_bytes(self) -> int:
        return 0

    def limit_memory(self, limit_bytes: int) -> bool:
        return False

    def cleanup(self) -> None:
        return None  # torch keeps no blocks on the CPU; those of malloc are trimmed by `devices.malloc`

    def synchronize(self) -> None:
        return None
