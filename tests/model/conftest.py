from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from config import T5ModelConfig

ROOT = Path(__file__).resolve().parents[2]

# what a child runs: `measure(work)` gives the most anonymous memory that `work` held above what was there before
MEASURE = """
import threading
import torch

torch.set_num_threads(1)


def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def measure(work):
    before, peak, done = anonymous(), [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            done.wait(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work()
    done.set()
    watcher.join()
    return max(peak[0], anonymous()) - before
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products take longer to share between threads than to compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_child() -> Callable[[str], list[int]]:
    """Run code in a child process, with `measure`; gives the whole numbers that it prints."""
    if not Path("/proc/self/status").exists():
        pytest.skip("this system has no /proc to read memory from")

    def run(code: str) -> list[int]:
        child = subprocess.run([sys.executable, "-c", MEASURE + code], cwd=ROOT, capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        return [int(word) for word in child.stdout.split()]

    return run


@pytest.fixture
def config() -> T5ModelConfig:
    """A T5 1.0 that is small, and whose sizes all differ."""
    return T5ModelConfig(
        vocab_size=37,
        d_model=12,
        d_kv=5,
        d_ff=20,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
    )
