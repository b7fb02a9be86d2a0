"""What torch finds here, and how fast it is: its build, and of every device memory, products and bandwidth.

Everything is measured on the device itself in about a second: a name or a capability flag says nothing of the speed of
a machine that is shared or throttled. The speeds are kept (`devices.machine_file`) for estimates of time; what a run
computes in is told as it is decided, by facts.
"""

from __future__ import annotations

from typing import Any

import torch

from devices import mps
from devices.base import Device, name_of
from devices.choose import backends
from settings.fields import AUTO

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def look(requested: str = AUTO) -> dict[str, Any]:
    """`torch`: its build and threads. `devices`: every backend in the order of choice, what it is and does, or why it is missing.

    Args:
        requested: `device`: "auto" measures all, a name that one alone; where it is missing, the reason is told.
    """
    reasons = {kind: kind.why_missing() for name, kind in backends().items() if requested in (AUTO, name)}
    missing = [{"name": kind.name, "missing": reason} for kind, reason in reasons.items() if reason]
    here = [kind(index) for kind, reason in reasons.items() if not reason for index in range(kind.count() or 1)]
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
    return {"torch": build, "devices": missing + [measured(device) for device in here]}


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
