"""Devices of this machine, one of each kind; a test whose device is missing is skipped with the reason."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from devices.base import Device
from devices.choose import backends
from devices.kernels.calls import use

GPUS = [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("mps", marks=pytest.mark.mps)]


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The first GPU of a kind, with exact fp32 products, and empty before and after."""
    yield from _opened(request.param)


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), *GPUS])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """As `gpu`; the CPU is one of them, with its compiled kernels."""
    yield from _opened(request.param)
    use(True)


def _opened(name: str) -> Iterator[Device]:
    backend = backends()[name]
    if reason := backend.why_missing():
        pytest.skip(reason)
    device = backend(0)
    device.set_exact_fp32(True)
    gc.collect()
    device.cleanup()
    device.reset_peak()
    yield device
    gc.collect()
    device.cleanup()
