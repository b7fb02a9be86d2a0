"""What torch finds here, and how fast it is: its build, and of every device memory, products and bandwidth.

Everything is measured on the device itself in about a second: a name or a capability flag says nothing of the speed of
a machine that is shared or throttled. The speeds are kept (`devices.machine_file`) for estimates of time; what a run
computes in is shown as it is decided, by facts.
"""

from __future__ import annotations

from typing import Any

import torch

from devices import mps
from devices.base import Device, name_of
from devices.choose import backends
from settings.fields import AUTO

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def device_report(requested: str = AUTO) -> dict[str, Any]:
    """`torch`: its build and threads. `devices`: what every backend is and does, or why it is missing, missing ones
    first.

    Args:
        requested: the setting `device`; auto measures all backends, a name that one alone.
    """
    missing: list[dict[str, Any]] = []
    available: list[dict[str, Any]] = []
    for name, backend in backends().items():
        if requested not in (AUTO, name):
            continue
        if reason := backend.why_missing():
            missing.append({"name": name, "missing": reason})
        else:
            available.extend(measured(backend(index)) for index in range(backend.count() or 1))
    build = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "threads": torch.get_num_threads(),
        "mac": mps.mac_hardware() or None,
    }
    return {"torch": build, "devices": missing + available}


def measured(device: Device) -> dict[str, Any]:
    """Memory in bytes, products in FLOP/s by dtype, copying in bytes/s, and the dtype that a run would compute in."""
    device.measure()
    rates = {name_of(dtype): device.multiply_rate(dtype) for dtype in DTYPES}
    return {
        "name": device.name,
        "missing": "",
        "about": device.describe(),
        "is_separate_memory": device.is_separate_memory,
        "total_bytes": device.memory_total_bytes(),
        "free_bytes": device.memory_free_bytes(),
        "class": device.speed_class,
        "rates": rates,
        "copy_rate": device.copy_rate(),
        "compute": name_of(device.choose_compute_dtype().dtype),
    }
