"""What waits for what when tensors are copied beside the computation, on streams that only write down what they are told."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from devices.copies import CudaCopies, HostCopies, Pool

CPU = torch.device("cpu")


class Stream:
    """Writes down what it is told to wait for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for all of {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        self.log.append(f"{self.name} marks {self.events}")
        return f"{self.name} {self.events}"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []
    computing = Stream("computing", written)

    @contextmanager
    def inside(stream: Stream):
        written.append(f"on {stream.name}:")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copying", written))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr("devices.copies.Pool", lambda is_pinned: Pool(is_pinned=False))
    return written


def test_copies_are_ordered_by_events(log: list[str]) -> None:
    copies, tensor = CudaCopies(CPU), torch.arange(6.0).view(2, 3)
    parked = copies.park(tensor)
    assert log == ["copying waits for all of computing", "on copying:", "copying marks 1"]
    log.clear()
    copies.release(parked)
    assert log == ["computing waits for copying 1"] and parked.device is None, "only then may its memory be written"
    log.clear()
    copies.begin_fetch(parked)
    copies.begin_fetch(parked)
    assert log == ["copying waits for all of computing", "on copying:", "copying marks 2"], "once"
    log.clear()
    assert torch.equal(copies.fetch(parked), tensor) and log == ["computing waits for copying 2"]
    log.clear()
    copies.settle()
    assert log == ["computing waits for all of copying"]


def test_what_comes_back_is_what_went() -> None:
    copies = HostCopies(CPU)
    tensors = [
        torch.randn(5, n).to(dtype) for n, dtype in ((1, torch.float32), (7, torch.bfloat16), (64, torch.float16))
    ]
    parked = [copies.park(tensor) for tensor in tensors]
    kept = [tensor.clone() for tensor in tensors]
    for one, tensor in zip(parked, tensors, strict=True):
        copies.release(one)
        tensor.zero_()
    for one, expected in reversed(list(zip(parked, kept, strict=True))):
        copies.begin_fetch(one)
        fetched = copies.fetch(one)
        assert torch.equal(fetched, expected) and fetched.data_ptr() != one.host.data_ptr()
