"""What a step costs the host beside the engine: how often memory is looked at, counted without a clock."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from settings.declared import ROOT
from tests.end_to_end.running import write_text

PROGRAM = """
import json, sys, threading
import devices
from config import load
from tests.fake_device import FakeDevice
from trainer_low_mem import LowMemTrainer

counts = {"device": 0, "proc": 0}

def is_main():
    return threading.current_thread() is threading.main_thread()

class Counted(FakeDevice):
    def memory_now_bytes(self):
        counts["device"] += is_main()
        return super().memory_now_bytes()

    def memory_idle_bytes(self):
        counts["device"] += is_main()
        return super().memory_idle_bytes()

    def memory_peak_bytes(self):
        counts["device"] += is_main()
        return super().memory_peak_bytes()

    def pinned_bytes(self):
        counts["device"] += is_main()
        return super().pinned_bytes()

def note_open(event, arguments):
    counts["proc"] += event == "open" and str(arguments[0]).startswith("/proc/") and is_main()

def note_step(event):
    if event["event"] == "step":
        print(json.dumps(counts), flush=True)

device = Counted(600 * 2**20)
devices.pick = lambda *names: device
sys.addaudithook(note_open)
flags = dict(flag.split("=") for flag in sys.argv[1:])
LowMemTrainer(load("train", flags), callbacks=[note_step]).train()
"""
FLAGS = (
    "train_file=text.txt",
    "d_model=16",
    "d_kv=8",
    "d_ff=32",
    "num_heads=2",
    "num_layers=1",
    "num_decoder_layers=1",
    "vocab_size=512",
    "max_seq_len=32",
    "max_steps=12",
    "effective_batch_size=2",
    "sample_rows=0",
    "eval_steps=100",
    "save_steps=100",
    "quiet=True",
)


def test_memory_is_sampled_once_a_step(tmp_path: Path) -> None:
    """Each figure of CUDA's allocator and each file of /proc takes a tenth of a millisecond, while a GPU has nothing to
    do.
    """
    write_text(tmp_path / "text.txt")
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", PROGRAM, *FLAGS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"device"')]
    assert len(counts) == 12
    for name, most in (("device", 5), ("proc", 1)):
        of_steps = [after[name] - before[name] for before, after in pairwise(counts)]
        assert statistics.median(of_steps) <= most, f"{name}: {of_steps}"
