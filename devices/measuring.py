"""How fast does this device multiply? Measured once and kept, for estimates of time alone (see `devices.machine_file`)."""

from __future__ import annotations

from devices import machine_file
from devices.base import Device, name_of
from devices.machine_file import Measured


def known_speed(device: Device) -> Measured | None:
    """What was measured of this device, here or in an earlier run; None: nothing yet."""
    return machine_file.read(_key(device))


def measure(device: Device) -> Measured:
    """Measure the dtypes that a run may compute in, in some tenths of a second, and keep what was found."""
    rates = {name_of(dtype): device.multiply_rate(dtype) for dtype in device.rated_dtypes}
    return machine_file.keep(_key(device), device.computes_on, device.threads, rates)


def _key(device: Device) -> str:
    kind = "cpu" if device.torch_device.type == "cpu" else device.name
    return machine_file.key_of(kind, device.computes_on)
