"""What a step costs the host beside the engine: how often memory is looked at, counted without a clock."""

from __future__ import annotations

import statistics
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import devices
from tests.end_to_end.running import write_text
from tests.fake_device import FakeDevice
from tests.training.small_runs import configuration
from trainer_low_mem import LowMemTrainer

STEPS = 12


class CountingDevice(FakeDevice):
    """Counts how often the thread that steps asks the allocator."""

    looks = 0

    def count(self) -> None:
        self.looks += threading.current_thread() is threading.main_thread()

    def memory_now_bytes(self) -> int:
        self.count()
        return super().memory_now_bytes()

    def memory_idle_bytes(self) -> int:
        self.count()
        return super().memory_idle_bytes()

    def memory_peak_bytes(self) -> int:
        self.count()
        return super().memory_peak_bytes()

    def pinned_bytes(self) -> int:
        self.count()
        return super().pinned_bytes()


def test_memory_is_sampled_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure of CUDA's allocator takes a tenth of a millisecond, while a GPU has nothing to do."""
    write_text(tmp_path / "text.txt")
    device = CountingDevice(600 << 20)
    monkeypatch.setattr(devices, "pick", lambda *names: device)
    looks: list[int] = []

    def note_step(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            looks.append(device.looks)

    flags = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_decoder_layers": 1, "max_seq_len": 32, "max_steps": STEPS}
    config = configuration(tmp_path, "counted", **flags, eval_steps=100, save_steps=100)
    LowMemTrainer(config, callbacks=[note_step]).train()
    assert len(looks) == STEPS
    of_steps = [after - before for before, after in pairwise(looks)]
    assert statistics.median(of_steps) <= 5, of_steps
