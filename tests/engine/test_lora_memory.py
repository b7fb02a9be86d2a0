"""Adapters take what the base takes at rest and little more; full finetuning takes gradients and state on top."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
STEPS = """
import sys, threading, torch
from devices.malloc import tune_malloc
tune_malloc("small")
torch.set_num_threads(1)
from config import T5ModelConfig
from engine.keep import Keep
from engine.optimizers import OPTIMIZERS, Step
from engine.residency import residency_for
from engine.update import Update
from engine.walk import Walk
from model import hf_format
from model.lora import LoraSettings, add_adapters
from model.loss import LossSettings
from tests.engine.small_models import Rectangle


def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


folder, base, adapts = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3] == "lora"
torch.mm(torch.ones(64, 64), torch.ones(64, 64))
before, peak, done = anonymous(), [0], threading.Event()
model = hf_format.load(folder, base)
if adapts:
    add_adapters(model, LoraSettings(8, 16.0))
update = Update(OPTIMIZERS["adamw"]({n: w for n, w in model.named_parameters() if w.requires_grad}))
residency = residency_for(base, torch.float32, (model.embedding, model.output_weight))
walk, batch = Walk(model, Keep(0), residency, LossSettings(chunk_bytes=1 << 22), 0.0), Rectangle(2, 32, 16, 2048)


def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        done.wait(0.001)


watcher = threading.Thread(target=watch)
watcher.start()
for number in (1, 2):
    update.begin(Step(number, 1e-3))
    walk.gradients(batch.slices(model, [[0], [1]]), batch.num_labels, update.ready)
    update.finish()
done.set()
watcher.join()
print(max(peak[0], anonymous()) - before)
"""


def peak_of(folder: Path, base: str, way: str) -> int:
    command = [sys.executable, "-c", STEPS, str(folder), base, way]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return int(child.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_peak_of_adapters_over_fp32_and_int8(tmp_path: Path) -> None:
    from config import T5ModelConfig
    from model import hf_format
    from model.t5 import T5

    shape = T5ModelConfig(vocab_size=2048, num_layers=3, num_decoder_layers=3)
    model = T5(shape).initialise(0)
    count, head = sum(w.numel() for w in model.parameters()), 4 * shape.vocab_size * shape.d_model
    hf_format.save(model, tmp_path)
    del model
    full, lora, small = (
        peak_of(tmp_path, *way) for way in (("float32", "full"), ("float32", "lora"), ("int8", "lora"))
    )
    assert lora < 4 * count + 24 * MIB, f"{lora / MIB:.0f} MiB over {4 * count / MIB:.0f} MiB of weights"
    assert small < count + head + 24 * MIB, f"{small / MIB:.0f} MiB over {count / MIB:.0f} MiB of weights"
    assert full > 12 * count > 2.4 * lora, "weights and two moments"
