"""Speed and memory of one system on one task: a child process of `benchmarks.throughput`, which prints one JSON line.

    python -m benchmarks.parts.one_system SYSTEM MODEL ROWS SOURCE TARGET STEPS

SYSTEM: ours-standard, ours-low, ours-ultra (this project's engine), shipped (Hugging Face T5 in fp32 with AdamW and
dropout 0.1, as its users run it), tuned (dropout 0, fused AdamW, bf16 autocast and torch.compile where bf16 is fast).
All see the same random rows of full length and start from random weights of the same shape.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.parts.children import status_bytes
from benchmarks.throughput import saved_blocks
from devices.cpu import CpuDevice
from settings.declared import T5ModelConfig
from settings.precedence import model_presets

DEVICE = CpuDevice()
ULTRA_ELEMENTS = 640 * 1024  # of a micro-batch's input of a block in mode ultra: a row or two of 626 tokens
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_dtype() -> torch.dtype:
    """The dtype whose products are fast here, by the class of the processor."""
    return DEVICE.choose_compute_dtype().dtype


def rows_of(config: T5ModelConfig, rows: int, source: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids (rows, source) and labels (rows, target)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, config.vocab_size, (rows, source + target), generator=generator)
    return ids[:, :source].contiguous(), ids[:, source:].contiguous()


def ours(mode: str, config: T5ModelConfig, rows: int, source: int, target: int) -> Callable[[int], float]:
    """The step of this project: the plan for `mode`, Adafactor."""
    from devices.malloc import HeapTrimmer, tune_malloc
    from engine.blockwise import Blockwise
    from engine.optimizer_in_backward import OptimizerInBackward
    from engine.optimizers import OPTIMIZERS, Step
    from engine.weights import weight_store_for
    from model.loss import LossSettings
    from model.micro_batch import MicroBatch
    from model.rows import Rows
    from model.t5 import T5

    tune_malloc("fast")  # what the plan takes while it fits
    compute = compute_dtype()
    storage = torch.bfloat16 if mode == "ultra" else compute
    model = T5(config, dtype=storage).initialise(0)
    blocks = config.num_layers + config.num_decoder_layers
    blockwise = Blockwise(
        model,
        saved_blocks(mode, blocks),
        weight_store_for(storage, compute),
        LossSettings(),
        0.0,
        between_blocks_dtype=storage,
        heap=HeapTrimmer("fast"),
    )
    update = OptimizerInBackward(OPTIMIZERS["adafactor"](dict(model.named_parameters())))
    input_ids, labels = rows_of(config, rows, source, target)
    # of one block at work: where it is to be small, what a wider model takes for the shortest micro-batch
    elements = ULTRA_ELEMENTS if mode == "ultra" else 2048 * config.d_model
    per_micro_batch = max(1, elements // ((source + target) * config.d_model))
    micro_batches = []
    for at in range(0, rows, per_micro_batch):
        part = slice(at, at + per_micro_batch)
        count = len(input_ids[part])
        decoder_ids = model.shift_right(labels[part])
        micro_batches.append(
            MicroBatch(
                input_ids[part].reshape(-1),
                decoder_ids.reshape(-1),
                labels[part].reshape(-1),
                Rows((source,) * count),
                Rows((target,) * count),
            )
        )

    def step(number: int) -> float:
        update.begin(Step(number, 1e-3))
        return float(blockwise.gradients(micro_batches, labels.numel(), update)) / labels.numel()

    return step


def peer_shape(config: T5ModelConfig) -> dict[str, Any]:
    """The model's shape, as the configuration of Hugging Face T5 takes it."""
    fields = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads")
    return {name: getattr(config, name) for name in (*fields, "feed_forward_proj", "tie_word_embeddings")}


def peer(is_tuned: bool, config: T5ModelConfig, rows: int, source: int, target: int) -> Callable[[int], float]:
    """The step of Hugging Face T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    is_bf16 = is_tuned and compute_dtype() == torch.bfloat16
    model = T5ForConditionalGeneration(
        T5Config(**peer_shape(config), dropout_rate=0.0 if is_tuned else 0.1, use_cache=False, decoder_start_token_id=0)
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_tuned or None)
    run = torch.compile(model) if is_tuned else model
    input_ids, labels = rows_of(config, rows, source, target)

    def step(number: int) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            loss = run(input_ids=input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def main(system: str, name: str, rows: int, source: int, target: int, steps: int) -> None:
    """Run a step to warm up and `steps` timed ones; print the figures."""
    config = T5ModelConfig(**model_presets()[name])
    make = ours if system.startswith("ours-") else peer
    step = make(system.removeprefix("ours-") if make is ours else system == "tuned", config, rows, source, target)  # type: ignore[arg-type,operator]
    losses, seconds = [step(1)], []
    gc.collect()
    for number in range(2, steps + 2):
        began = time.perf_counter()
        losses.append(step(number))
        seconds.append(time.perf_counter() - began)
    dtype = torch.float32 if system == "shipped" else compute_dtype()
    rates = {name: DEVICE.multiply_rate(kind) for name, kind in DTYPES.items()}
    name_of = {kind: name for name, kind in DTYPES.items()}
    figures = {"seconds": seconds, "losses": losses, "high_water_bytes": status_bytes().get("VmHWM", 0)}
    print(
        json.dumps({**figures, "rates": rates, "compute": name_of[dtype], "product_rate": DEVICE.multiply_rate(dtype)})
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(word) for word in sys.argv[3:7]))
