"""Time and memory of the steps of one system: a child process of `benchmarks.gpus`, which prints a JSON line a work.

    python -m benchmarks.gpus.one_system SYSTEM DEVICE STEPS WORK [WORK ...]

The modes of this project are the engine that training builds, with bf16 weights and Adafactor. `amp` is Hugging Face T5
as its Trainer runs it: fp32 weights under bf16 autocast, torch's fused attention, fused AdamW. `regional` is the
fastest that its users build: bf16 weights, each block compiled. All see the same rows, from the host and anew in every
step, and read the loss of each. Padding is the peers' own way to hold rows of different length.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpus.works import COMPILE, HAS_COMPILE, MODES, WORKS
from benchmarks.traced.traced_step import TracedWork, batches_of, planned_bytes
from devices.base import Device, place
from devices.choose import pick
from engine.optimizers import Step
from engine.step import Done
from settings.declared import Config
from training.setup.build import build
from training.setup.resolved import Beginning

WARM_STEPS = 3  # Libraries are loaded, kernels compiled, and the optimizer's state is made.
RATE = 1e-4
TakeStep = Callable[[int], float]  # The number of a step, from 1 on -> the mean loss of a label.


def ours(work: TracedWork, is_compiled: bool, device: Device) -> TakeStep:
    settings = {**asdict(work.model), "dropout_rate": work.dropout, "optimizer": work.optimizer}
    if HAS_COMPILE:
        settings[COMPILE] = is_compiled
    engine = build(Beginning(config=Config().with_changes(**settings), device=device), work.choice)
    batches = batches_of(work)
    labels = sum(batch.num_labels for batch in batches)

    def take_step(number: int) -> float:
        outcome = engine.step(Step(number, RATE, seed=1), batches, labels)
        assert isinstance(outcome, Done), outcome
        return outcome.loss / labels

    return take_step


def hugging_face(work: TracedWork, is_compiled: bool, device: Device) -> TakeStep:
    from transformers import T5Config, T5ForConditionalGeneration

    names = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads")
    shape = {name: getattr(work.model, name) for name in names}
    config = T5Config(
        **shape, dropout_rate=work.dropout, use_cache=False, decoder_start_token_id=0, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if is_compiled else torch.float32
    model = T5ForConditionalGeneration(config).train().to(device.torch_device, dtype)
    if is_compiled:
        for block in (*model.encoder.block, *model.decoder.block):
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    (batch,) = batches_of(work)
    longest = batch.input_lengths.max(), batch.target_lengths.max()  # Our own batches are padded a little further.
    inputs = {
        "input_ids": torch.from_numpy(batch.input_ids[:, : longest[0]]),
        "labels": torch.from_numpy(batch.labels[:, : longest[1]]),
    }
    is_token = torch.arange(longest[0]) < torch.from_numpy(batch.input_lengths)[:, None]
    if not is_token.all():
        inputs["attention_mask"] = is_token.long()

    def take_step(number: int) -> float:
        optimizer.zero_grad()
        there = {name: place(tensor, device.torch_device) for name, tensor in inputs.items()}
        with torch.autocast(device.torch_device.type, torch.bfloat16, enabled=not is_compiled):
            loss = model(**there).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return take_step


def measured(take_step: TakeStep, device: Device, steps: int) -> dict[str, Any]:
    """Time the first step, then `steps` more behind some that warm up, and trace one; without CUDA nothing is
    traced.
    """
    began = time.perf_counter()
    losses = [take_step(1)]
    first_seconds = time.perf_counter() - began
    losses += [take_step(number) for number in range(2, WARM_STEPS + 1)]
    gc.collect()
    seconds = []
    for number in range(WARM_STEPS + 1, WARM_STEPS + steps + 1):
        device.synchronize()
        began = time.perf_counter()
        losses.append(take_step(number))
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    figures = {"seconds": statistics.median(seconds), "best_seconds": min(seconds), "first_seconds": first_seconds}
    traced = {"gpu_seconds": 0.0, "kernels": 0, "peak_bytes": 0}
    if device.name == "cuda":
        traced["peak_bytes"] = torch.cuda.max_memory_allocated(device.torch_device)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            take_step(WARM_STEPS + steps + 1)
            device.synchronize()
        kernels = [event for event in trace.events() or [] if event.device_type.name == "CUDA"]
        traced["gpu_seconds"] = sum(event.device_time for event in kernels) / 1e6
        traced["kernels"] = len(kernels)
    return {**figures, **traced, "losses": losses}


def main(system: str, device_name: str, steps: int, *names: str) -> None:
    """Measure one work after the other, and print the figures of each."""
    device = pick(device_name)
    for name in names:
        work = WORKS[name]
        planned = 0
        device.reset_peak()
        if system in MODES:
            work = replace(work, saved=MODES[system].saved_blocks)
            planned = planned_bytes(work, device.library_bytes)
            figures = measured(ours(work, MODES[system].is_compiled, device), device, steps)
        else:
            figures = measured(hugging_face(work, system == "regional", device), device, steps)
        speed = sum(map(sum, work.lengths)) / figures["seconds"]
        further = {"tokens_per_second": speed, "planned_bytes": planned, "card": f"{device.name} {device.computes_on}"}
        print(json.dumps({"work": name, **figures, **further}), flush=True)
        torch.compiler.reset()
        gc.collect()
        device.cleanup()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
