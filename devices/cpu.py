"""The CPU as a device. Its tensors are in the process's own RAM, which `memory.monitor` counts."""

from __future__ import annotations

import torch

from devices.base import Device
from devices.torch_compiler import why_not_for_cpu
from settings.fields import counted
from support.language import join


class CpuDevice(Device):
    """The CPU. It has no memory of its own: all figures are 0, host memory tells everything."""

    name = "cpu"

    def __init__(self, index: int = 0) -> None:
        super().__init__(torch.device("cpu"))

    def describe(self) -> str:
        return join(", ", ["CPU", counted(torch.get_num_threads(), "thread")])

    def why_not_compiling(self) -> str:
        return why_not_for_cpu()
